"""The configuration of a run: frozen dataclasses, validated where they are built.

One JSON file fills them, the command line overrides any field, and the resolved form is written into the run folder.
This module imports nothing heavy, so that `cs336 --help` is fast.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from .checks import check_types, checkpointed_blocks, is_place, require, require_at_least
from .data import DataConfig
from .model import ModelConfig

STRATEGIES = (
    "none",
    "naive",
    "flat",
    "overlap",
    "individual",
    "bucketed",
    "flashddp",
    "fsdp",
    "torch_ddp",
    "torch_fsdp",
)
"""Names of strategies, those of `cs336_systems.parallel`."""
SHARDED = ("fsdp", "torch_fsdp")
"""Strategies that shard the weights, and with them gradients and optimizer state."""


def _final_rate(lr: float) -> float:
    return lr / 10


def without_derived_rate(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The group `optimizer` of a configuration file, without a min_lr that follows from its own lr.

    Where the command line gives another lr, it is to follow that.
    """
    lr, min_lr = optimizer.get("lr"), optimizer.get("min_lr")
    is_derived = type(lr) is float and min_lr == _final_rate(lr)
    return {name: value for name, value in optimizer.items() if name != "min_lr" or not is_derived}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule: linear warm-up, then half a cosine down to min_lr."""

    implementation: Literal["own", "torch", "torch_foreach", "torch_fused"] = "own"
    """own: the readable one in cs336_basics. The others are torch.optim.AdamW; torch_fused is the fastest."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float | None = None
    """Final learning rate (default: lr / 10)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up (default: a tenth of cosine_steps, at most 100)."""
    cosine_steps: int | None = None
    """Step at which the learning rate reaches min_lr, where it stays (default: train.max_steps)."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norm weights are not decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""

    def __post_init__(self) -> None:
        check_types(self, "optimizer.")
        require_at_least(self, "optimizer", 0, "lr", "min_lr", "warmup_steps", "weight_decay", "eps")
        require_at_least(self, "optimizer", 1, "cosine_steps")
        for i, beta in enumerate(self.betas):
            require(0 <= beta < 1, f"optimizer.betas[{i}]", beta, "at least 0 and below 1")
        min_lr = _final_rate(self.lr) if self.min_lr is None else self.min_lr
        object.__setattr__(self, "min_lr", min_lr)
        accepted = f"at most optimizer.lr, {self.lr:g} (a run's config.json holds the one that it ran with)"
        require(min_lr <= self.lr, "optimizer.min_lr", min_lr, accepted)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The training loop."""

    max_steps: int = 1000
    """Total number of optimizer steps."""
    max_minutes: float | None = None
    """Stop after the step in which this many minutes have passed since the data was ready, as if it were the last:
    validate, save and sample (default: only max_steps counts). The learning-rate schedule still follows max_steps."""
    batch_size: int = 32
    """Sequences per optimizer step, over all micro-batches and processes."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per optimizer step; must divide batch_size."""
    max_grad_norm: float | None = 1.0
    """Scale gradients down to at most this global norm; null only measures the norm."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast type; fp16 also scales the loss. weight_dtype sets the type of the weights."""
    weight_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of weights, gradients and optimizer state. bf16, which needs precision bf16, takes half the memory but loses
    updates below a 256th of a weight."""
    compile: bool = False
    """Use torch.compile, block by block."""
    compile_memory_budget: float = 1.0
    """With compile, the share of a block's activations that may be kept. Below 1, PyTorch recomputes the cheapest ones
    in the backward pass (its activation_memory_budget; at 0.75, norms and the product of the gated layer)."""
    cuda_graph: bool = False
    """Record forward and backward as a CUDA graph and replay it. This removes launch overhead, which dominates for
    small models."""
    activation_checkpointing: str = "none"
    """none; block: each block keeps only its input, and the backward pass recomputes the rest; first_K: only the first
    K blocks do so; every_K: every K-th block does; groups_K: K blocks together keep only the input of the first."""
    loss_chunk_tokens: int | None = None
    """Number of tokens whose logits are in memory at a time, for large vocabularies (default: all)."""
    deterministic: bool = False
    """Use deterministic algorithms on the GPU too (slower), for runs that must repeat bit for bit."""
    validation_interval: int = 100
    """Validate every this many steps and after the last one; 0: only after the last."""
    validation_sequences: int = 256
    """Sequences per validation, from the start of the validation file."""
    skip_nonfinite: bool = False
    """Skip and count steps with a non-finite loss or gradient, instead of stopping."""
    seed: int = 0
    """Seed of the weights and of the data order."""

    def __post_init__(self) -> None:
        check_types(self, "train.")
        require_at_least(
            self, "train", 1, "max_steps", "batch_size", "gradient_accumulation_steps", "validation_sequences"
        )
        require_at_least(self, "train", 0, "validation_interval")
        minutes = self.max_minutes
        require(minutes is None or 0 < minutes < 1e6, "train.max_minutes", minutes, "above 0 and below 1e6")
        require_at_least(self, "train", 1, "loss_chunk_tokens")
        require(
            self.weight_dtype == "fp32" or self.precision == "bf16",
            "train.weight_dtype",
            self.weight_dtype,
            f"'fp32' with train.precision {self.precision!r}",
        )
        budget = self.compile_memory_budget
        require(
            budget == 1 or (0 <= budget < 1 and self.compile),
            "train.compile_memory_budget",
            budget,
            "from 0 to 1, and 1 without train.compile",
        )
        require(0 <= self.seed < 1 << 63, "train.seed", self.seed, "at least 0 and below 2^63")
        require(
            not (self.cuda_graph and self.precision == "fp16"),
            "train.cuda_graph",
            self.cuda_graph,
            "false with train.precision 'fp16', whose loss scaling decides on the host",
        )
        if self.max_grad_norm == math.inf:  # JSON has no infinity
            object.__setattr__(self, "max_grad_norm", None)
        limit = self.max_grad_norm
        require(limit is None or limit > 0, "train.max_grad_norm", limit, "above 0, or null: do not clip")
        require(
            self.batch_size % self.gradient_accumulation_steps == 0,
            "train.gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            f"a divisor of train.batch_size, {self.batch_size}",
        )
        checkpointed_blocks(self.activation_checkpointing, "train.")

    @property
    def checkpointed(self) -> tuple[str, int] | None:
        """Which blocks are checkpointed: ("first", K), ("every", K), ("groups", K), or None for no block."""
        return checkpointed_blocks(self.activation_checkpointing, "train.")

    def check_checkpointed(self, num_layers: int) -> None:
        """Raise ValueError if K exceeds the number of blocks, because that would be another name for all of them."""
        require(
            self.checkpointed is None or self.checkpointed[1] <= num_layers,
            "train.activation_checkpointing",
            self.activation_checkpointing,
            f"none, block, first_K, every_K or groups_K with K from 1 to {num_layers}, the number of blocks",
        )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Training with several processes together, one per GPU."""

    strategy: str = "auto"
    """How the processes share the work: none, naive, flat, overlap, individual, bucketed, flashddp, fsdp, torch_ddp,
    torch_fsdp, or a class of your own as module:Class. auto: none for one process, overlap with bucket_size_mb 100 for
    several."""
    devices: int = 1
    """Processes to start on this machine, one per GPU. Under torchrun, torchrun starts them."""
    bucket_size_mb: float | None = None
    """Size of the groups in which gradients are sent, in 2^20 bytes (default: 100 for auto and bucketed, PyTorch's 25
    for torch_ddp; overlap sends each gradient by itself, as individual always does). The other strategies ignore it."""
    shard_optimizer: bool = False
    """Each process keeps the optimizer state of only its own part of the parameters (ZeRO stage 1)."""
    reshard_after_forward: bool = True
    """With fsdp or torch_fsdp: free weights after the forward pass and gather them again for the backward pass. False
    keeps them whole in between (ZeRO stage 2): less is sent, and more is held, the weights in train.precision."""
    grad_dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Type in which gradients are sent; same: their own type."""
    nccl_max_ctas: int | None = None
    """Thread blocks per GPU that NCCL may use for sending; they do not compute meanwhile (default: NCCL's choice). Not
    for gloo."""
    init_timeout_s: float = 300.0
    """Seconds that processes wait for each other at the start."""
    step_timeout_s: float = 120.0
    """Seconds that one process waits for another within a step before the run ends with a message."""

    def __post_init__(self) -> None:
        check_types(self, "parallel.")
        known = self.strategy in ("auto", *STRATEGIES) or is_place(self.strategy)
        accepted = f"one of auto, {', '.join(STRATEGIES)}, or module:Class"
        require(known, "parallel.strategy", self.strategy, accepted)
        require_at_least(self, "parallel", 1, "devices", "nccl_max_ctas")
        for name in ("bucket_size_mb", "init_timeout_s", "step_timeout_s"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1e9, f"parallel.{name}", value, "above 0 and below 1e9")
        require(
            not (self.shard_optimizer and self.strategy in SHARDED),
            "parallel.shard_optimizer",
            self.shard_optimizer,
            f"false with parallel.strategy {self.strategy!r}, which shards the optimizer's state anyway",
        )
        require(
            self.reshard_after_forward or self.strategy in SHARDED or is_place(self.strategy),
            "parallel.reshard_after_forward",
            self.reshard_after_forward,
            f"true with parallel.strategy {self.strategy!r}, which does not shard weights",
        )
        require(
            not (self.devices > 1 and self.strategy == "none"),
            "parallel.strategy",
            self.strategy,
            f"another than 'none' with parallel.devices {self.devices}",
        )

    def strategy_for(self, world_size: int) -> str:
        """The strategy for this many processes, with auto resolved."""
        if self.strategy == "auto":
            return "none" if world_size == 1 else "overlap"
        return self.strategy

    def group_size_mb(self) -> float | None:
        """`bucket_size_mb`, or auto's default; None for the strategy's own default."""
        return 100.0 if self.strategy == "auto" and self.bucket_size_mb is None else self.bucket_size_mb


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and how much to keep."""

    checkpointing_interval: int = 0
    """Save every this many steps; 0 or less: save only the last step, which is always saved."""
    keep_last: int | None = None
    """Keep only this many of the newest checkpoints (default: all)."""
    async_save: bool = False
    """Continue training while a checkpoint is written from a copy in main memory."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint.")
        require_at_least(self, "checkpoint", 1, "keep_last")


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """How text is sampled, at the end of a run and by `cs336 generate`."""

    prompt: str = ""
    """Text to continue; empty starts a new document."""
    max_new_tokens: int | None = None
    """Tokens to add, at most (default: until the context is full)."""
    temperature: float = 0.8
    """Sampling temperature; 0 takes the most likely token."""
    top_k: int | None = None
    """Sample only from the k most likely tokens."""
    top_p: float | None = 0.95
    """Sample only from the most likely tokens that together reach this probability."""
    seed: int = 0
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        check_types(self, "sample.")
        require_at_least(self, "sample", 0, "max_new_tokens", "temperature")
        require_at_least(self, "sample", 1, "top_k")
        require(0 <= self.seed < 1 << 63, "sample.seed", self.seed, "at least 0 and below 2^63")
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise ValueError(f"sample.prompt is {self.prompt!r}: it must be valid UTF-8")
        require(self.top_p is None or 0 < self.top_p <= 1, "sample.top_p", self.top_p, "above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What training logs besides metrics.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Also log to Weights & Biases."""
    wandb_project: str = "cs336"
    """Project name at Weights & Biases."""

    def __post_init__(self) -> None:
        check_types(self, "log.")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that describes one run, from the text to the sample."""

    model: ModelConfig
    run_dir: str | None = None
    """Folder of the run (default: runs/SOURCE-DATE-TIME)."""
    resume: str = "none"
    """none; auto: the newest complete checkpoint in run_dir, if there is one; or the path of a checkpoint. A run's
    config.json does not keep it."""
    init_from: str | None = None
    """Run or checkpoint to take the initial weights from, and nothing else (default: random weights)."""
    skip_data: bool = False
    """Use the token files as they are, and make none."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        check_types(self, "")
        paths = {"run_dir": "the path of a folder, or left out", "resume": "none, auto or a checkpoint"}
        for name, accepted in paths.items():
            path = getattr(self, name)
            require(path is None or path.strip() != "", name, path, accepted)
        if self.resume == "auto":
            require(self.run_dir is not None, "run_dir", self.run_dir, "given where resume is 'auto'")
        room = self.model.shape.context_length - 1
        require(
            (self.sample.max_new_tokens or 0) <= room,
            "sample.max_new_tokens",
            self.sample.max_new_tokens,
            f"at most {room}, what model.context_length, {room + 1}, leaves after a prompt",
        )
        self.check_world_size(self.parallel.devices)
        self.train.check_checkpointed(self.model.shape.num_layers)
        end = self.optimizer.cosine_steps or self.train.max_steps
        if self.optimizer.warmup_steps is None:
            warmup_steps = min(100, end // 10)
            object.__setattr__(self, "optimizer", dataclasses.replace(self.optimizer, warmup_steps=warmup_steps))
        elif self.optimizer.cosine_steps is not None:
            accepted = f"at least optimizer.warmup_steps, {self.optimizer.warmup_steps}"
            require(self.optimizer.warmup_steps <= end, "optimizer.cosine_steps", end, accepted)

    def check_world_size(self, world_size: int) -> None:
        """Raise ValueError if this many processes cannot share a batch, or cannot do what is configured."""
        train, parallel = self.train, self.parallel
        if train.batch_size % (world_size * train.gradient_accumulation_steps):
            raise ValueError(
                f"train.batch_size is {train.batch_size}: it must be divisible by the number of processes times "
                f"train.gradient_accumulation_steps, {world_size} x {train.gradient_accumulation_steps}"
            )
        if world_size > 1:
            require(
                parallel.strategy != "none", "parallel.strategy", "none", f"another for {world_size} processes together"
            )
            require(
                train.device in ("auto", "cpu", "cuda"),
                "train.device",
                train.device,
                f"auto, cpu or cuda: each of {world_size} processes takes a GPU of its own",
            )
        if train.cuda_graph:
            peers = ("torch_fsdp", "torch_ddp")
            require(
                parallel.strategy not in peers,
                "parallel.strategy",
                parallel.strategy,
                f"none of {', '.join(peers)} with train.cuda_graph",
            )

    @property
    def schedule(self) -> dict[str, Any]:
        """The arguments of `get_cosine_lr` after the step, each by the field that sets it."""
        optimizer = self.optimizer
        fields = {f"optimizer.{name}": getattr(optimizer, name) for name in ("lr", "min_lr", "warmup_steps")}
        return fields | {"optimizer.cosine_steps": optimizer.cosine_steps or self.train.max_steps}

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunConfig":
        """The configuration that `to_dict` returned, also after a round trip through JSON."""
        groups = {name: hint for name, hint in get_type_hints(cls).items() if dataclasses.is_dataclass(hint)}
        given = dict(values)
        for name, group in groups.items():
            if name in given:
                fields = {k: tuple(v) if isinstance(v, list) else v for k, v in given[name].items()}
                given[name] = group(**fields)  # type: ignore[operator]
        return cls(**given)
