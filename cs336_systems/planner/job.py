"""The input of a plan: a model, the work of one GPU in a step, and how GPUs share the work."""

from dataclasses import dataclass
from typing import Literal

from cs336_basics.shape import ModelShape

from ..config.checks import (
    BUT_ATTENTION,
    check_types,
    checkpointed_blocks,
    keeps_attention,
    offloaded_blocks,
    require,
    require_at_least,
    without_groups,
)
from ..config.model import check_fp8
from ..config.run import SHARDED
from .accounting import FLASH_ATTENTION, KINDS, NUMBER_BYTES, PLAIN_ATTENTION, offload_window, widths

ATTENTION = (*PLAIN_ATTENTION, "flash", *FLASH_ATTENTION)
WITH_WINDOW = (
    *PLAIN_ATTENTION,
    "flash",
    "auto",
    "flash_torch",
    "flash_triton",
    "flash_triton_compiled",
    "flash_attention_triton",
)
"""Attention whose memory does not change with a window."""
WITHOUT_RATE = ("flash_torch", "flash_triton_simple", "flash_triton_compiled")
"""Kernels to read or to compare with, slower than the rates of `cards`."""
OVERLAPPED = ("overlap", "individual", "bucketed", "torch_ddp", "fsdp", "torch_fsdp")
"""Strategies that communicate during the backward pass."""
COPIED = ("overlap", "individual", "bucketed")
"""Strategies whose all-reduces copy engines carry out."""
STRATEGIES = ("none", "naive", "flat", *OVERLAPPED, "fsdp_simple")
NEED_FLOAT32 = ("torch_ddp", "torch_fsdp")
"""Strategies that a 16-bit run gives float32 weights."""
ALIASES = {"flashddp": "bucketed"}
"""Names of training strategies that mean one of STRATEGIES."""
IN_BUCKETS = {"bucketed": 100.0, "torch_ddp": 25.0}
"""Strategies that keep gradients in buckets, with the default bucket size in 2^20 bytes."""
MASTER_BYTES = {"bf16": 2, "fp8": 2, "fp16": 4}
"""Bytes that the optimizer keeps of each float32 master: of a bfloat16 weight's only the lower half."""


def check_kept_attention(policy: str, attention: str) -> None:
    """Raise ValueError if checkpointing is to keep the outputs of a kernel that is not one operator."""
    is_possible = not keeps_attention(policy) or attention in ("flash", *FLASH_ATTENTION)
    accepted = f"one without {BUT_ATTENTION}, because attention is {attention!r}"
    require(is_possible, "activation_checkpointing", policy, accepted)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training step of one GPU of `world_size`."""

    shape: ModelShape
    """The model; its context_length is the length of the sequences."""
    batch_size: int = 4
    """Sequences per GPU."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "bf16"
    """Type of computation. fp8: bf16 with FP8 products in the blocks."""
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights that are updated, and of the optimizer's state."""
    attention: str = "flash"
    """naive, flash, or a kernel's registered name."""
    activation_checkpointing: str = "none"
    """none, block, first_K, every_K or groups_K; all but groups_K may end in _but_attention."""
    activation_offload: str = "none"
    """none, or first_K: what the first K blocks keep is in host memory until their backward pass. `cs336 plan memory`
    and `cs336 plan step` also take auto, the smallest K that fits the card."""
    loss_chunk_tokens: int | None = None
    """Tokens whose logits are in memory at a time (default: all)."""
    compile: bool = False
    """Use torch.compile, block by block."""
    compile_memory_budget: float = 1.0
    """Share of a compiled block's activations that may be kept."""
    cuda_graph: bool = False
    """Record the step as a CUDA graph."""
    strategy: str = "none"
    """How GPUs share the work (default: none; in `cs336 plan`, for several GPUs, the default of `cs336 train`)."""
    world_size: int = 1
    """Number of GPUs."""
    shard_optimizer: bool = False
    """ZeRO stage 1: each GPU keeps the optimizer state of its part."""
    reshard_after_forward: bool = True
    """fsdp: free weights after the forward pass and gather them again for the backward pass; false: keep them whole."""
    bucket_size_mb: float | None = None
    """Gradients sent together, in 2^20 bytes (default: 100 for bucketed, 25 for torch_ddp; overlap: each by itself)."""
    grad_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Type in which gradients are sent."""
    copy_engines: bool = True
    """Whether copy engines send instead of NCCL (fsdp, overlap, individual, bucketed)."""
    optimizer: bool = True
    """Whether there is an optimizer step (AdamW in one kernel, PyTorch's or `fused`)."""
    fused: bool = False
    """The optimizer `fused`, which clips as well, and has float32 masters of 16-bit matrices."""
    muon: bool = False
    """Muon for the matrices of the blocks: one moment in place of two."""
    clip: bool = True
    """Whether gradients are scaled by their norm."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require_at_least(self, "", 1, "batch_size", "world_size", "loss_chunk_tokens")
        self._check_shape()
        narrow, budget = self.weight_dtype == "bf16", self.compile_memory_budget
        accepted = not narrow or self.computing == "bf16"
        require(accepted, "weight_dtype", "bf16", f"fp32 with precision {self.precision!r}")
        require(not (self.fused and narrow), "fused", True, "false with weight_dtype 'bf16'")
        require(not (self.muon and narrow), "muon", True, "false with weight_dtype 'bf16'")
        accepted = budget == 1 or (0 <= budget < 1 and self.compile)
        require(accepted, "compile_memory_budget", budget, "from 0 to 1, and 1 without compile")
        require(self.attention in ATTENTION, "attention", self.attention, f"one of {', '.join(ATTENTION)}")
        strategy, size = self.strategy, self.bucket_size_mb
        require(strategy in STRATEGIES, "strategy", strategy, f"one of {', '.join(STRATEGIES)}")
        checkpointed_blocks(self.activation_checkpointing, "", self.shape.num_layers)
        check_kept_attention(self.activation_checkpointing, self.attention)
        offloaded_blocks(self.activation_offload, "", self.activation_checkpointing, self.shape.num_layers)
        require(size is None or 0 < size < 1e9, "bucket_size_mb", size, "above 0 and below 1e9")
        accepted = strategy != "none" or self.world_size == 1
        require(accepted, "strategy", strategy, f"another than 'none' with world_size {self.world_size}")
        accepted = not (self.shard_optimizer and self.is_sharded)
        require(accepted, "shard_optimizer", True, f"false with strategy {strategy!r}, which shards it anyway")
        accepted = self.reshard_after_forward or self.is_sharded
        require(accepted, "reshard_after_forward", False, f"true with strategy {strategy!r}, which shards no weights")
        if size is None and strategy in IN_BUCKETS:
            object.__setattr__(self, "bucket_size_mb", IN_BUCKETS[strategy])

    def _check_shape(self) -> None:
        if self.precision == "fp8":
            with without_groups():
                check_fp8(self.shape)
        tied, window, kernels = self.shape.tie_embeddings, self.shape.window, ", ".join(WITH_WINDOW)
        accepted = "another than torch_fsdp with tie_embeddings true: there is no prediction for both"
        require(not (tied and self.strategy == "torch_fsdp"), "strategy", self.strategy, accepted)
        accepted = f"one of {kernels} with window {window}: there is no prediction for others"
        require(not self.shape.num_windowed or self.attention in WITH_WINDOW, "attention", self.attention, accepted)

    @property
    def tokens(self) -> int:
        """T: tokens per GPU and step."""
        return self.batch_size * self.shape.context_length

    @property
    def computing(self) -> str:
        """Type of everything but the inputs of products."""
        return "bf16" if self.precision == "fp8" else self.precision

    @property
    def rounds_weights_once(self) -> bool:
        """Whether FP8 weights are kept for the step. Where each rank has a part of a weight, each use rounds it."""
        return self.precision == "fp8" and not self.is_sharded and self.strategy not in NEED_FLOAT32

    @property
    def packs(self) -> bool:
        """Whether products with one input are one: q, k and v, and w1 and w3 (`kernels/packed_linear.py`)."""
        lie_apart = self.casts_weights or self.strategy in ("fsdp_simple", "torch_fsdp")
        return self.compile and self.precision != "fp8" and not lie_apart

    @property
    def recomputes_elementwise(self) -> bool:
        """Whether compiled blocks recompute what needs no product: norms, and the gated product."""
        return self.precision == "fp8" or self.compile_memory_budget < 1

    @property
    def number_bytes(self) -> int:
        """c: bytes per number in the output of a matrix product."""
        return NUMBER_BYTES[self.precision]

    @property
    def weight_bytes(self) -> int:
        """Bytes per number of the weights that are updated, and of the optimizer's moments."""
        return NUMBER_BYTES[self.weight_dtype]

    @property
    def has_masters(self) -> bool:
        """Whether the model's matrices are 16-bit, and the optimizer has their float32 masters."""
        return self.fused and self.number_bytes == 2 and self.strategy not in NEED_FLOAT32

    @property
    def master_bytes(self) -> int:
        """Bytes that the optimizer keeps of each master."""
        return MASTER_BYTES[self.precision] if self.has_masters else 0

    @property
    def weight_dtypes(self) -> dict[str, str]:
        """Types of the model's weights, for each of KINDS."""
        matrices = self.computing if self.has_masters else self.weight_dtype
        head = self.weight_dtype if self.shape.tie_embeddings else matrices
        return {"blocks": matrices, "head": head, "others": self.weight_dtype}

    @property
    def gradient_dtypes(self) -> dict[str, str]:
        """Types of their gradients. A loss in chunks adds the head's up in float32."""
        is_sum = self.has_masters and self.loss_chunk_tokens is not None
        return self.weight_dtypes | ({"head": "fp32"} if is_sum else {})

    @property
    def sent_dtypes(self) -> dict[str, str]:
        return self.gradient_dtypes if self.grad_dtype == "same" else dict.fromkeys(KINDS, str(self.grad_dtype))

    @property
    def cast_to_send(self) -> dict[str, int]:
        """Bytes per number of the copies in which gradients travel, 0 for those that are sent as they are."""
        own, sent = self.gradient_dtypes, self.sent_dtypes
        return {kind: NUMBER_BYTES[sent[kind]] if sent[kind] != own[kind] else 0 for kind in KINDS}

    @property
    def weight_passes(self) -> tuple[int, float]:
        """How often FSDP gathers all weights in a step, and bytes of gradients that it sends for a byte of weights."""
        sent = self.number_bytes if self.grad_dtype == "same" else NUMBER_BYTES[self.grad_dtype]
        return 2 if self.reshard_after_forward else 1, sent / self.number_bytes

    @property
    def sends_by_copies(self) -> bool:
        """Whether copy engines send (`parallel/peer_memory.py`), between GPUs of one machine."""
        is_even = all(n % self.world_size == 0 for n in (self.shape.d_model, self.shape.d_ff, *widths(self.shape)))
        of_fsdp = self.strategy == "fsdp" and is_even and self.weight_dtypes["blocks"] == self.computing
        return self.world_size > 1 and self.copy_engines and (of_fsdp or self.strategy in COPIED)

    @property
    def computes_narrow(self) -> bool:
        """Whether all weights that the model computes with are 16-bit."""
        return self.number_bytes == 2 and (self.weight_bytes == 2 or self.is_sharded)

    @property
    def casts_weights(self) -> bool:
        """Whether autocast makes 16-bit copies of float32 weights."""
        return self.number_bytes == 2 and not self.computes_narrow and not self.has_masters

    @property
    def casts_head(self) -> bool:
        """Whether autocast makes one of the head's: a tied one is float32 beside 16-bit matrices."""
        return self.casts_weights or (self.has_masters and self.shape.tie_embeddings and not self.is_sharded)

    @property
    def residual_number_bytes(self) -> int:
        """Bytes per number of the residual stream. Beside float32 masters it is 16-bit in bfloat16 alone."""
        return 2 if self.computes_narrow or (self.has_masters and self.computing == "bf16") else 4

    @property
    def logits_tokens(self) -> int:
        """Tokens whose logits are in memory at a time."""
        return min(self.tokens, self.loss_chunk_tokens or self.tokens)

    @property
    def holds_scores(self) -> bool:
        """Whether attention keeps its scores in memory."""
        return self.attention in PLAIN_ATTENTION

    @property
    def why_no_time(self) -> str:
        """What of the step has no measured rate, or ""."""
        if self.attention in WITHOUT_RATE:
            return f"attention is {self.attention}: the rates of cards are those of faster kernels"
        window, length = self.shape.window, self.shape.context_length
        if window is None or window >= length or self.holds_scores:
            return ""
        return f"window is {window}, below context_length {length}: the rate of {self.attention} there is not measured"

    @property
    def kernel(self) -> str:
        """The registered name of the attention kernel."""
        return "sdpa" if self.attention == "flash" else self.attention

    @property
    def is_sharded(self) -> bool:
        """Whether weights and gradients are divided over the GPUs."""
        return self.strategy in SHARDED

    @property
    def weight_parts(self) -> int:
        """Into how many parts weights and gradients are divided."""
        return self.world_size if self.is_sharded else 1

    @property
    def state_parts(self) -> int:
        """Into how many parts the optimizer state is divided."""
        return self.world_size if self.is_sharded or self.shard_optimizer else 1

    @property
    def checkpointing(self) -> tuple[str, int] | None:
        """Policy (first, every or groups) and its K, or None without checkpointing."""
        return checkpointed_blocks(self.activation_checkpointing, "")

    @property
    def keeps_attention(self) -> bool:
        """Whether checkpointed blocks keep attention's outputs."""
        return keeps_attention(self.activation_checkpointing)

    @property
    def offloaded_blocks(self) -> int:
        """Number of blocks, from the first on, whose activations are in host memory."""
        return offloaded_blocks(self.activation_offload, "")

    @property
    def offload_window(self) -> int:
        """Number of blocks that run while an offloaded one is copied."""
        policy, k = self.checkpointing or ("none", 1)
        return offload_window(self.offloaded_blocks, self.shape.num_layers, k if policy == "groups" else 1)
