"""A model and a repeated step, to be timed or profiled.

`Workload` describes it. `Workbench` builds model, batch and optimizer on their device; its methods are the phases of a
step.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import cross_entropy
from cs336_basics.shape import ModelShape

from ..config.checks import check_types, require, without_groups
from ..config.model import MODEL_SIZES, ModelConfig
from ..config.run import DataConfig, OptimizerConfig, ParallelConfig, RunConfig, TrainConfig
from ..kernels.attention import get_attention
from ..machine.hardware import DTYPE_NAMES, autocast, check_precision, memory_bytes, select_device, use_device
from ..planner.accounting import num_parameters
from ..planner.forward_memory import forward_peak_bytes
from ..planner.job import Job, check_kept_attention
from ..planner.memory import peak_bytes
from ..planner.rows import workload_job
from ..training.build import Compiled, build_optimizer, pack_matrices, prepare_blocks
from .instruments.timing import Stopwatch
from .instruments.trace import named_range

QUICK_SIZE = "quick"
_QUICK = dict(vocab_size=300, d_model=32, d_ff=64, num_layers=2, num_heads=2)
PHASES = ("forward", "backward", "optimizer")


def model_of(size: str | None, vocab_size: int | None = None, **fields: Any) -> ModelConfig:
    """The architecture of a named size, of `quick`, or of the fields. Raises ValueError for an invalid one."""
    accepted = (*MODEL_SIZES, QUICK_SIZE)
    require(size is None or size in accepted, "model.size", size, f"one of {', '.join(accepted)}")
    named: dict[str, Any] = _QUICK if size == QUICK_SIZE else {"size": size}
    if vocab_size is not None:
        named = {**named, "vocab_size": vocab_size}
    return ModelConfig(**named, **fields)


def random_run(model: ModelConfig, parallel: ParallelConfig | None = None, **train: Any) -> RunConfig:
    """A run on random tokens with fused AdamW, whose steps a case measures. `train` has fields of TrainConfig."""
    return RunConfig(
        model=model,
        data=DataConfig(source="random"),
        optimizer=OptimizerConfig(implementation="torch_fused"),
        train=TrainConfig(**{"compile": False, "cuda_graph": False} | train),
        parallel=parallel or ParallelConfig(),
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its input, its numerics, and how much of a training step it does."""

    size: str = "small"
    """Named size of the model: small, medium, large, xl, 2.7B, 10B or 8B; quick for a tiny one."""
    vocab_size: int | None = None
    """Size of the vocabulary (default: the size's, else 10,000)."""
    context_length: int = 512
    """Tokens per sequence."""
    batch_size: int = 4
    """Sequences per batch."""
    mode: Literal["forward", "forward_backward", "train_step"] = "forward_backward"
    """forward: only the loss, without gradients. train_step: with the optimizer step."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast type; weights are float32."""
    compile: bool = False
    """Use torch.compile, block by block."""
    attention: str = "naive"
    """Attention kernel by its registered name."""
    activation_checkpointing: str = "none"
    """As in training: none, block, first_K, every_K, groups_K, or block_but_attention."""
    optimizer: Literal["own", "torch", "torch_foreach", "torch_fused"] = "torch_fused"
    """Implementation of AdamW."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""

    def __post_init__(self) -> None:
        check_types(self, "")
        for name in ("context_length", "batch_size"):
            require(1 <= getattr(self, name) < 1 << 31, name, getattr(self, name), "at least 1 and below 2^31")
        with without_groups():
            shape, _ = self.shape, self.train_config
            get_attention(self.attention)
            object.__setattr__(self, "device", str(select_device(self.device)))
            object.__setattr__(self, "vocab_size", shape.vocab_size)
        self.check_checkpointed()

    @property
    def model_config(self) -> ModelConfig:
        return model_of(self.size, self.vocab_size, context_length=self.context_length, attention=self.attention)

    @property
    def train_config(self) -> TrainConfig:
        names = ("batch_size", "precision", "compile", "activation_checkpointing", "device")
        return TrainConfig(**{name: getattr(self, name) for name in names})

    def check_checkpointed(self) -> None:
        with without_groups():
            self.train_config.check_checkpointed(self.shape.num_layers)
        check_kept_attention(self.activation_checkpointing, self.attention)

    def check_host_memory(self) -> None:
        """Raise MemoryError if this exceeds the machine's memory: the system would kill the process silently."""
        needed, there = self.least_bytes(), memory_bytes(torch.device("cpu"))
        if there is not None and needed > there:
            raise MemoryError(
                f"size {self.size}, batch_size {self.batch_size}, context_length {self.context_length}: {self.mode} "
                f"needs about {needed / 2**30:,.1f} GiB, and the machine has {there / 2**30:,.1f} GiB"
            )

    def least_bytes(self) -> float:
        """Memory that the planner predicts; if it cannot, the bytes of weights, gradients and optimizer state."""
        try:
            job = self.job
            return float(forward_peak_bytes(job) if self.mode == "forward" else peak_bytes(job))
        except ValueError:
            copies = {"forward": 1, "forward_backward": 2, "train_step": 4}[self.mode]
            return 4.0 * copies * num_parameters(self.shape)

    @property
    def shape(self) -> ModelShape:
        return self.model_config.shape

    @property
    def job(self) -> Job:
        return workload_job({**asdict(self), **asdict(self.shape)})


class Workbench:
    """A built workload. Call `forward`, `backward` and `optimizer_step`, or `step` for all phases of its mode.

    Weights and tokens are random, the same for equal workloads. On a GPU, calls return before the work is done.
    """

    def __init__(self, config: Workload) -> None:
        self.config, self.device = config, use_device(config.device)
        check_precision(self.device, config.precision)
        if self.device.type == "cpu":
            config.check_host_memory()
        torch.manual_seed(0)
        shape = config.shape
        with self.device:
            self.model = TransformerLM(**asdict(shape), attention=get_attention(config.attention))
            tokens = torch.randint(shape.vocab_size, (config.batch_size, config.context_length + 1))
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer: torch.optim.Optimizer | None = None
        if config.mode == "train_step":
            self.optimizer = build_optimizer(self.model, OptimizerConfig(implementation=config.optimizer))
        prepare_blocks(self.model, config.train_config)
        if config.train_config.packs:
            pack_matrices(self.model)
        self._loss = Compiled(cross_entropy) if config.compile else cross_entropy
        self._logits_dtype: torch.dtype | None = None

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES[: ("forward", "forward_backward", "train_step").index(self.config.mode) + 1]

    def forward(self) -> Tensor:
        """The mean loss in nats per token; with a graph for `backward` unless the mode is forward."""
        with_gradients, precision = self.config.mode != "forward", self.config.precision
        with named_range("forward"), torch.set_grad_enabled(with_gradients), autocast(self.device, precision):
            logits = self.model(self.inputs)
            self._logits_dtype = logits.dtype
            return self._loss(logits, self.targets)

    def backward(self, loss: Tensor) -> None:
        with named_range("backward"):
            loss.backward()

    def optimizer_step(self) -> None:
        """Update the weights if there is an optimizer, and clear the gradients."""
        if self.optimizer is not None:
            with named_range("optimizer"):
                self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def step(self, after: Callable[[str], None] = lambda phase: None) -> Tensor:
        """One step of the mode; returns its loss. `after` is called with each phase's name when the phase is over.

        If there is a backward pass, "optimizer" follows it even without an optimizer: then it only clears gradients.
        """
        loss = self.forward()
        after("forward")
        if self.config.mode != "forward":
            self.backward(loss)
            after("backward")
            self.optimizer_step()
            after("optimizer")
        return loss.detach()

    def time_phases(self, steps: int) -> dict[str, list[float]]:
        """The times in ms of each phase of some steps. The host waits for the device after each phase."""
        times: dict[str, list[float]] = {phase: [] for phase in PHASES}
        watch = Stopwatch(self.device)
        for _ in range(steps):
            self.step(after=lambda phase: times[phase].append(watch.lap_ms()))
        return {phase: times[phase] for phase in self.phases}

    def read_back(self) -> dict[str, Any]:
        """Workload and architecture for the row, read from the built model after it has run."""
        blocks: list[Any] = list(self.model.layers)
        return dataclasses.asdict(self.config) | dict(
            vocab_size=self.model.vocab_size,
            d_model=blocks[0].ln1.weight.shape[0],
            d_ff=blocks[0].ffn.w1.weight.shape[0],
            num_layers=len(blocks),
            num_heads=blocks[0].attn.num_heads,
            batch_size=self.inputs.shape[0],
            context_length=self.inputs.shape[1],
            precision=self.config.precision if self._logits_dtype is None else DTYPE_NAMES[self._logits_dtype],
            compile=is_compiled(blocks[0]),
            device=str(self.device),
        )


def numerics(config: Any) -> str:
    """Precision, compilation and attention: "bf16 compiled naive"."""
    return f"{config.precision} {'compiled ' if config.compile else ''}{config.attention}"


def is_compiled(block: Any) -> bool:
    """Whether a block's forward is compiled, even if it is also checkpointed."""
    return any(isinstance(function, Compiled) for function in wrapped(block.forward))


def wrapped(function: Any) -> Iterator[Any]:
    """A function and the functions inside it: of a partial its function and first argument, and what is compiled."""
    yield function
    if isinstance(function, functools.partial):
        for inner in (function.func, *function.args[:1]):
            yield from wrapped(inner)
    elif isinstance(function, Compiled):
        yield from wrapped(function.function)
