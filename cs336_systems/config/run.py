"""The configuration of a run: frozen dataclasses that check their values when they are built.

The docstring under each field is its help on the command line. Imports nothing heavy, so that `cs336 --help` is fast.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from .checks import (
    check_types,
    checkpointed_blocks,
    from_json,
    is_import_path,
    keeps_attention,
    offloaded_blocks,
    require,
    require_at_least,
    require_field,
)
from .data import DataConfig
from .model import ModelConfig, check_fp8

STRATEGIES = {
    "none": "strategy:Strategy",
    "naive": "ddp:NaiveDDP",
    "flat": "ddp:FlatDDP",
    "overlap": "ddp:DDP",
    "individual": "ddp:IndividualDDP",
    "bucketed": "bucketed:DDPBucketed",
    "flashddp": "bucketed:DDPBucketed",
    "fsdp": "fsdp:FSDP",
    "fsdp_simple": "fsdp_simple:SimpleFSDP",
    "torch_ddp": "torch_peers:TorchDDP",
    "torch_fsdp": "torch_peers:TorchFSDP",
}
"""Parallel strategies: the module and class of each in `cs336_systems.parallel`."""
SHARDED = ("fsdp", "fsdp_simple", "torch_fsdp")
"""Strategies that shard weights, gradients and optimizer state."""
NOT_RECORDED = ("torch_ddp", "torch_fsdp")
"""Strategies whose step cannot be recorded as a CUDA graph."""


def _default_min_lr(lr: float) -> float:
    return lr / 10


def without_default_min_lr(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Remove a default min_lr from a configuration file's `optimizer` group, which a resolved file contains.

    Then it follows an --optimizer.lr on the command line.
    """
    lr, min_lr = optimizer.get("lr"), optimizer.get("min_lr")
    is_default = type(lr) is float and min_lr == _default_min_lr(lr)
    return {name: value for name, value in optimizer.items() if name != "min_lr" or not is_default}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and the learning rate of each step."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of the blocks, AdamW for the rest. Muon (Jordan et al. 2024) takes the
    implementation fused, so a CUDA graph holds its update too."""
    implementation: Literal["own", "torch", "torch_foreach", "torch_fused", "fused"] = "own"
    """Of AdamW. own: the readable one in cs336_basics. torch, torch_foreach, torch_fused: variants of
    torch.optim.AdamW. fused: clips and updates in one pass over memory, the fastest. Runs with 16-bit matrices and
    float32 masters always take fused, and so does muon; runs with weight_dtype bf16 take torch_fused instead of it."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float | None = None
    """Final learning rate (default: lr / 10)."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. cosine: half a cosine down to min_lr. wsd: lr, then a linear decay to min_lr.
    constant: lr."""
    decay_steps: int | None = None
    """Steps of the decay of wsd, before cosine_steps (default: a fifth of cosine_steps)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up (default: a tenth of cosine_steps, at most 100)."""
    cosine_steps: int | None = None
    """Step at which the learning rate reaches min_lr and stays there (default: train.max_steps)."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Norm weights are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    muon_lr: float | None = None
    """Peak learning rate of Muon, which follows the schedule of lr (default: lr). Its updates are as large as AdamW's
    (Liu et al. 2025), so the rates are alike."""
    muon_momentum: float = 0.95
    """Nesterov momentum of Muon."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        require_at_least(self, "optimizer", 0, "lr", "min_lr", "muon_lr", "warmup_steps", "weight_decay")
        require_at_least(self, "optimizer", 1e-20, "eps")  # below, gradients whose squares vanish make weights leap
        require_at_least(self, "optimizer", 1, "cosine_steps", "decay_steps")
        for i, beta in enumerate(self.betas):
            require(0 <= beta < 1, f"optimizer.betas[{i}]", beta, "at least 0 and below 1")
        accepted = "at least 0 and below 1"
        require_field(self, "optimizer.muon_momentum", 0 <= self.muon_momentum < 1, accepted)
        is_possible = self.muon_momentum == OptimizerConfig.muon_momentum or self.name == "muon"
        accepted = f"{OptimizerConfig.muon_momentum} unless optimizer.name is 'muon'"
        require_field(self, "optimizer.muon_momentum", is_possible, accepted)
        accepted = "left out unless optimizer.name is 'muon'"
        require_field(self, "optimizer.muon_lr", self.muon_lr is None or self.name == "muon", accepted)
        accepted = f"above 0 with optimizer.muon_lr, {self.muon_lr}, whose schedule it sets"
        require_field(self, "optimizer.lr", self.muon_lr is None or self.lr > 0, accepted)
        min_lr = _default_min_lr(self.lr) if self.min_lr is None else self.min_lr
        object.__setattr__(self, "min_lr", min_lr)
        accepted = f"at most optimizer.lr, {self.lr:g} (a run's config.json contains its resolved min_lr)"
        require_field(self, "optimizer.min_lr", min_lr <= self.lr, accepted)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    max_steps: int = 1000
    """Total number of optimizer steps."""
    max_minutes: float | None = None
    """Stop after this many minutes, counted from when the data is ready, and finish the run as after its last step
    (default: no limit). The learning-rate schedule still follows max_steps."""
    batch_size: int = 32
    """Sequences per optimizer step, over all micro-batches and processes."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step. Must divide batch_size."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this global norm. null measures the norm without clipping."""
    device: str = "auto"
    """auto, cpu, mps, cuda or cuda:N. auto uses the GPU if there is one."""
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Dtype of computation. With bf16 and fp16 the model has 16-bit matrices, and the optimizer their float32 masters.
    Embedding and norms stay float32. torch_ddp and torch_fsdp keep float32 weights. fp16 also scales the loss. fp8 is
    bf16 with FP8 products in the blocks; it needs a GPU of compute capability 8.9, and pays for wide models."""
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which weights are kept and updated. bf16 needs precision bf16 or fp8: weights, gradients and optimizer
    state are bf16 then. It halves the memory, but loses updates smaller than 1/256 of a weight."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each block with torch.compile. auto: if the run is long enough to gain from it (half a minute on a GPU,
    ten minutes on a CPU with a C++ compiler), and with a compile_memory_budget below 1."""
    compile_memory_budget: float = 1.0
    """With compile: fraction of each block's activations to keep for the backward pass. Below 1, PyTorch recomputes the
    cheapest ones (its activation_memory_budget); 0.75 recomputes the norms and the product in the gated layer. fp8
    recomputes these at 1, so it is best left there: below 1 it recomputes products too."""
    cuda_graph: bool | Literal["auto"] = "auto"
    """Record the step as a CUDA graph and replay it. This removes launch overhead, which dominates for small models.
    With optimizer.implementation fused the update is recorded too. auto: on a GPU, except with torch_ddp, torch_fsdp,
    a strategy or an attention kernel of your own, masks that wait for the GPU, and transfers by gloo."""
    activation_checkpointing: str = "none"
    """none: keep all activations. block: each block keeps only its input and is recomputed in the backward pass.
    first_K: only the first K blocks do this. every_K: every K-th block does. groups_K: K blocks together keep only the
    first one's input. block_but_attention, first_K_but_attention, every_K_but_attention: the blocks keep attention's
    outputs too, so that attention is not computed again; with compile, whatever the compile_memory_budget."""
    activation_offload: str = "none"
    """first_K: copy what the first K blocks keep for the backward pass to pinned host memory, and back ahead of their
    backward pass. auto: the smallest K with which the run fits its GPU by `cs336 plan`; none on a CPU."""
    loss_chunk_tokens: int | None = None
    """Compute logits and loss for this many tokens at a time, to save memory with a large vocabulary (default: all)."""
    deterministic: bool = False
    """Use deterministic algorithms on the GPU too. This is slower, but runs repeat bit for bit."""
    validation_interval: int = 100
    """Validate every this many steps and after the last step. 0: only after the last."""
    validation_sequences: int = 256
    """Sequences per validation, from the start of the validation file. Those left over by whole batches of all
    processes are not used."""
    skip_nonfinite: bool = False
    """Skip and count steps with a non-finite loss or gradient instead of stopping."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""

    def __post_init__(self) -> None:
        check_types(self, "train.")
        counts = ("max_steps", "batch_size", "gradient_accumulation_steps", "validation_sequences", "loss_chunk_tokens")
        require_at_least(self, "train", 1, *counts)
        require_at_least(self, "train", 0, "validation_interval", "seed")
        minutes, budget = self.max_minutes, self.compile_memory_budget
        require_field(self, "train.max_minutes", minutes is None or 0 < minutes < 1e6, "above 0 and below 1e6")
        is_possible = self.weight_dtype == "fp32" or self.precision in ("bf16", "fp8")
        accepted = f"'fp32' unless train.precision is bf16 or fp8 (it is {self.precision!r})"
        require_field(self, "train.weight_dtype", is_possible, accepted)
        is_possible = budget == 1 or (0 <= budget < 1 and self.compile is not False)
        require_field(self, "train.compile_memory_budget", is_possible, "from 0 to 1, and 1 without train.compile")
        if self.max_grad_norm == math.inf:  # JSON has no infinity
            object.__setattr__(self, "max_grad_norm", None)
        limit = self.max_grad_norm
        require_field(self, "train.max_grad_norm", limit is None or limit > 0, "above 0, or null: do not clip")
        is_possible = self.batch_size % self.gradient_accumulation_steps == 0
        accepted = f"a divisor of train.batch_size, {self.batch_size}"
        require_field(self, "train.gradient_accumulation_steps", is_possible, accepted)
        checkpointed_blocks(self.activation_checkpointing, "train.")
        self.offloaded_blocks()

    @property
    def has_masters(self) -> bool:
        """Whether matrices are 16-bit in the model and float32 in the optimizer."""
        return self.precision != "fp32" and self.weight_dtype == "fp32"

    @property
    def packs(self) -> bool:
        """Whether layers of a block with one input become one product. Eager blocks stay easy to follow."""
        return bool(self.compile) and self.precision != "fp8"

    @property
    def checkpointed(self) -> tuple[str, int] | None:
        """Checkpointed blocks: ("first", K), ("every", K), ("groups", K), or None for no block."""
        return checkpointed_blocks(self.activation_checkpointing, "train.")

    @property
    def keeps_attention(self) -> bool:
        """Whether checkpointed blocks keep attention's outputs."""
        return keeps_attention(self.activation_checkpointing)

    def offloaded_blocks(self, num_layers: int | None = None) -> int:
        """Number of blocks whose activations go to host memory; 0 for auto, until `training.auto` decides.

        Raises ValueError if there are not more blocks, or if K divides a group of checkpointed ones.
        """
        policy = "none" if self.activation_offload == "auto" else self.activation_offload
        return offloaded_blocks(policy, "train.", self.activation_checkpointing, num_layers)

    def check_checkpointed(self, num_layers: int) -> None:
        """Raise ValueError if a K exceeds the number of blocks."""
        checkpointed_blocks(self.activation_checkpointing, "train.", num_layers)
        self.offloaded_blocks(num_layers)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Training with several processes, one per GPU."""

    strategy: str = "auto"
    """How the processes share the work, such as overlap, bucketed or fsdp. auto: none for one process; for several fsdp
    with reshard_after_forward false. With several micro-batches, with bucket_size_mb or with shard_optimizer it is
    overlap, with bucket_size_mb 100 and shard_optimizer true. All: none, naive, flat, overlap, individual, bucketed,
    flashddp, fsdp, fsdp_simple, torch_ddp, torch_fsdp, or your own class as module:Class."""
    devices: int = 1
    """Number of processes to start on this machine, one per GPU. Under torchrun, torchrun starts them."""
    bucket_size_mb: float | None = None
    """Size of a gradient bucket in MiB (default: 100 for bucketed and for the overlap of auto; 25, PyTorch's own, for
    torch_ddp; overlap sends each gradient separately). individual always sends them separately. Other strategies
    ignore this."""
    shard_optimizer: bool | Literal["simple"] = False
    """Split the optimizer state over the processes, ZeRO stage 1. Each process updates its own part of the parameters.
    simple: the readable version, which sends no parameters before all are updated."""
    reshard_after_forward: bool = True
    """For fsdp and torch_fsdp: free weights after the forward pass and gather them again for the backward pass. false
    keeps them, in train.precision (ZeRO stage 2): less communication, more memory."""
    grad_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Dtype in which gradients are sent and averaged. same: the gradient's own dtype; for sharded weights
    train.precision. fp32: twice the bytes of 16 bits, but the average is rounded only once."""
    nccl_max_ctas: int | None = None
    """Thread blocks per GPU that NCCL may take from computation (default: NCCL's choice). Not for gloo."""
    copy_engines: bool = True
    """Let copy engines send between GPUs of one machine, where they can: weights and gradients of fsdp, gradients of
    overlap, individual and bucketed. false: NCCL sends."""
    init_timeout_s: float = 300.0
    """Seconds that processes wait for each other at the start."""
    step_timeout_s: float = 120.0
    """Seconds that a process waits for another within a step before the run fails."""

    def __post_init__(self) -> None:
        check_types(self, "parallel.")
        strategy = self.strategy
        is_own = is_import_path(strategy)
        accepted = f"one of auto, {', '.join(STRATEGIES)}, or module:Class"
        require_field(self, "parallel.strategy", strategy in ("auto", *STRATEGIES) or is_own, accepted)
        require_at_least(self, "parallel", 1, "devices", "nccl_max_ctas")
        for name in ("bucket_size_mb", "init_timeout_s", "step_timeout_s"):
            value = getattr(self, name)
            require_field(self, f"parallel.{name}", value is None or 0 < value < 1e9, "above 0 and below 1e9")
        is_possible = not (self.shard_optimizer and strategy in SHARDED)
        accepted = f"false with parallel.strategy {strategy!r}, which shards the optimizer's state anyway"
        require_field(self, "parallel.shard_optimizer", is_possible, accepted)
        is_possible = self.reshard_after_forward or strategy in SHARDED or is_own
        why = "decides it" if strategy == "auto" else "does not shard weights"
        accepted = f"true with parallel.strategy {strategy!r}, which {why}"
        require_field(self, "parallel.reshard_after_forward", is_possible, accepted)

    def resolved(self, world_size: int, micro_batches: int = 1) -> "ParallelConfig":
        """These options with strategy auto resolved: for this many processes, and micro-batches in a step."""
        if self.strategy != "auto":
            return self
        if world_size == 1:
            return dataclasses.replace(self, strategy="none")
        if micro_batches == 1 and not (self.bucket_size_mb or self.shard_optimizer):
            return dataclasses.replace(self, strategy="fsdp", reshard_after_forward=False)
        # fsdp would send the gradients of each micro-batch.
        size, sharded = self.bucket_size_mb or 100.0, self.shard_optimizer or True
        return dataclasses.replace(self, strategy="overlap", bucket_size_mb=size, shard_optimizer=sharded)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and how many to keep."""

    checkpointing_interval: int = 0
    """Steps between checkpoints, if above 0. The last step always saves one."""
    keep_last: int | None = None
    """Number of newest checkpoints to keep (default: all)."""
    async_save: bool = False
    """Copy each checkpoint to main memory and write it while training continues."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint.")
        require_at_least(self, "checkpoint", 1, "keep_last")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How to sample text, at the end of a run and in `cs336 generate`."""

    prompt: str = ""
    """Text to continue. Empty starts a new document."""
    max_new_tokens: int | None = None
    """Maximum number of tokens to add (default: until the context is full)."""
    temperature: float = 0.8
    """Sampling temperature. 0 takes the most likely token."""
    top_k: int | None = None
    """Sample only from the k most likely tokens."""
    top_p: float | None = 0.95
    """Sample only from the most likely tokens that together reach this probability."""
    seed: int = 0
    """Seed for sampling."""

    def __post_init__(self) -> None:
        check_types(self, "sample.")
        require_at_least(self, "sample", 0, "max_new_tokens", "temperature", "seed")
        require_at_least(self, "sample", 1, "top_k")
        require_field(self, "sample.top_p", self.top_p is None or 0 < self.top_p <= 1, "above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs besides metrics.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard event files to the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases."""
    wandb_project: str = "cs336"
    """Name of the Weights & Biases project."""

    def __post_init__(self) -> None:
        check_types(self, "log.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of one run, from the text to the sample."""

    model: ModelConfig
    run_dir: str | None = None
    """Folder of the run (default: runs/SOURCE-DATE-TIME)."""
    resume: str = "none"
    """Continue from a checkpoint: its path, or auto for the newest in run_dir. auto skips incomplete checkpoints, and
    starts anew if there is none. Not saved in config.json."""
    init_from: str | None = None
    """Run, checkpoint or Hugging Face folder to load the initial weights from (default: random weights). On a command
    line without a configuration of the model, its architecture and tokenizer are the defaults."""
    skip_data: bool = False
    """Use the token files as they are. Do not make any."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_types(self, "")
        require_field(self, "run_dir", self.run_dir != "", "a folder, or left out")
        if self.resume == "auto":
            require(self.run_dir is not None, "run_dir", self.run_dir, "given where resume is 'auto'")
        if self.train.precision == "fp8":
            check_fp8(self.model.shape)
        context_length, optimizer = self.model.shape.context_length, self.optimizer
        accepted = f"at most {context_length - 1}, to leave room for a prompt in model.context_length, {context_length}"
        is_possible = (self.sample.max_new_tokens or 0) < context_length
        require_field(self.sample, "sample.max_new_tokens", is_possible, accepted)
        implementation = optimizer.implementation
        accepted = "'fp32' with optimizer.name 'muon'"
        is_possible = self.train.weight_dtype == "fp32" or optimizer.name != "muon"
        require_field(self.train, "train.weight_dtype", is_possible, accepted)
        if self.train.has_masters or optimizer.name == "muon":
            implementation = "fused"
        elif self.train.weight_dtype == "bf16" and implementation == "fused":
            implementation = "torch_fused"
        optimizer = dataclasses.replace(optimizer, implementation=implementation)
        object.__setattr__(self, "optimizer", optimizer)
        self.check_world_size(self.parallel.devices)
        self.train.check_checkpointed(self.model.shape.num_layers)
        end = optimizer.cosine_steps or self.train.max_steps
        if optimizer.warmup_steps is None:
            warmup_steps = min(100, end // 10)
            object.__setattr__(self, "optimizer", dataclasses.replace(optimizer, warmup_steps=warmup_steps))
        elif optimizer.cosine_steps is not None:
            accepted = f"at least optimizer.warmup_steps, {optimizer.warmup_steps}"
            require_field(optimizer, "optimizer.cosine_steps", optimizer.warmup_steps <= end, accepted)
        warmup = self.optimizer.warmup_steps or 0
        decay, most = optimizer.decay_steps, max(end - warmup, 0)
        accepted = "left out unless optimizer.schedule is 'wsd'"
        require_field(optimizer, "optimizer.decay_steps", decay is None or optimizer.schedule == "wsd", accepted)
        accepted = f"at most {most}, the steps that optimizer.warmup_steps, {warmup}, leaves of {end}"
        require_field(optimizer, "optimizer.decay_steps", decay is None or decay <= most, accepted)

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if this many processes cannot share a batch, or cannot run this configuration."""
        train, parallel = self.train, self.parallel
        if train.batch_size % (world_size * train.gradient_accumulation_steps):
            raise ValueError(
                f"train.batch_size is {train.batch_size}: it must be divisible by the number of processes times "
                f"train.gradient_accumulation_steps, {world_size} x {train.gradient_accumulation_steps}"
            )
        if world_size > 1:
            accepted = f"auto, or a strategy of several processes, because there are {world_size}"
            require_field(parallel, "parallel.strategy", parallel.strategy != "none", accepted)
            accepted = f"auto, cpu or cuda: each of {world_size} processes takes a GPU of its own"
            require_field(train, "train.device", train.device in ("auto", "cpu", "cuda"), accepted)
        is_possible = not (train.cuda_graph is True and parallel.strategy in NOT_RECORDED)
        accepted = f"another than {', '.join(NOT_RECORDED)}, because train.cuda_graph is true"
        require_field(parallel, "parallel.strategy", is_possible, accepted)

    def resolved_for(self, world_size: int) -> "RunConfig":
        """This configuration with `parallel.strategy` auto resolved for this many processes."""
        parallel = self.parallel.resolved(world_size, self.train.gradient_accumulation_steps)
        return dataclasses.replace(self, parallel=parallel)

    @property
    def schedule(self) -> dict[str, Any]:
        """What the learning rate of a step depends on, by the field that sets it."""
        optimizer = self.optimizer
        names = ("schedule", "lr", "min_lr", "warmup_steps")
        fields: dict[str, Any] = {f"optimizer.{name}": getattr(optimizer, name) for name in names}
        total_steps = fields["optimizer.cosine_steps"] = optimizer.cosine_steps or self.train.max_steps
        if optimizer.schedule == "wsd":
            most = max(1, total_steps - fields["optimizer.warmup_steps"])
            fields["optimizer.decay_steps"] = optimizer.decay_steps or min(-(-total_steps // 5), most)
        return fields

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """Rebuild a configuration from `to_dict`, also after a round trip through JSON."""
        given = dict(values)
        for name in GROUPS.keys() & given.keys():
            given[name] = from_json(GROUPS[name], given[name])
        return cls(**given)


GROUPS: dict[str, type] = {
    name: hint
    for name, hint in get_type_hints(RunConfig).items()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint)
}
"""The groups of fields in a run: model, data, train and so on."""
