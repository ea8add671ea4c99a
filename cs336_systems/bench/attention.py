"""The case `attention`: every kernel of the registry beside the others, forward and backward, at some shapes.

The kernels of a shape take turns, several rounds of them: a GPU that gets hot lowers its clock, and one kernel after
the other would have the first on a cold card.
"""

import functools
import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._functorch import config as functorch_config

from cs336_basics.model import Attention

from ..hardware import select_device, use_device
from ..kernels.attention import ATTENTION, get_attention
from ..kernels.attention.contract import attention_flops
from ..training.metrics import summarise
from .case import Row
from .timing import time_ms

CASE = "attention"
KERNELS = tuple(name for name in ATTENTION if name not in ("scaled_dot_prod_attention", "flash_attention_triton"))
# What docs/log.md compares with others' published figures.
SHAPES = (
    (1, 16, 1024, 64),
    (4, 25, 1024, 64),
    (8, 16, 4096, 64),
    (1, 16, 8192, 64),
    (1, 16, 16384, 64),
    (1, 16, 16384, 128),
    (1, 16, 65536, 64),
)
QUICK_SHAPES = ((1, 2, 64, 16), (1, 2, 65, 32))
_SIZE_LIMIT = 1 << 31
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class AttentionBench:
    """What to measure: each kernel at each shape."""

    kernels: tuple[str, ...] = KERNELS
    """Names of the registry."""
    shapes: tuple[tuple[int, int, int, int], ...] = SHAPES
    """(B, H, N, D) of q, k and v."""
    dtype: str = "bf16"
    """bf16, fp16 or fp32."""
    is_causal: bool = True
    """Whether query i sees only the keys up to i."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    rounds: int = 3
    """How often the kernels take turns."""
    warmup_ms: float = 25.0
    """Time for warming up before each measurement of a round."""
    rep_ms: float = 50.0
    """Time for measuring, of each of the four measurements of a round."""

    def __post_init__(self) -> None:
        for name in self.kernels:
            if name not in ATTENTION:
                raise ValueError(f"kernels has {name!r}: each must be one of {', '.join(ATTENTION)}")
        for shape in self.shapes:
            if len(shape) != 4 or not all(1 <= size < _SIZE_LIMIT for size in shape):
                raise ValueError(f"shapes has {shape}: each must be four numbers, B x H x N x D, from 1 to 2^31 - 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}: it must be one of {', '.join(DTYPES)}")
        for field, least in (("rounds", 1), ("warmup_ms", 0), ("rep_ms", 0)):
            if not least <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} is {getattr(self, field)}: it must be at least {least} and finite")
        try:
            select_device(self.device)
        except ValueError as error:
            raise ValueError(str(error).removeprefix("train.")) from error


def measure(config: AttentionBench) -> Iterator[Row]:
    """One row for each shape and kernel, yielded as a shape is done; what fails is a row of status error or oom."""
    device = use_device(config.device)
    for shape in config.shapes:
        yield from _measure_shape(config, shape, device)  # its tensors are gone before those of the next are made


def _measure_shape(config: AttentionBench, shape: tuple[int, ...], device: torch.device) -> Iterator[Row]:
    facts = {"shape": list(shape), "dtype": config.dtype, "is_causal": config.is_causal, "device": device.type}
    facts |= {key: value for key, value in asdict(config).items() if key in ("rounds", "warmup_ms", "rep_ms")}
    torch.manual_seed(0)
    try:
        q, k, v, do = (torch.randn(shape, device=device, dtype=DTYPES[config.dtype]) for _ in range(4))
    except Exception as error:  # a RuntimeError too, where the size overflows or a CPU has too little memory
        status, message = _failure(error)
        for name in config.kernels:
            yield Row(case=CASE, variant=name, config=facts, status=status, error=message)
        return
    subjects = [_Subject(name, (q, k, v), do, config.is_causal) for name in config.kernels]
    for subject in subjects:
        subject.run(subject.first_call)
    for _ in range(config.rounds):
        for subject in subjects:
            subject.run(functools.partial(subject.time_all, config.warmup_ms, config.rep_ms))
    for subject in subjects:
        yield subject.row(facts)


def _failure(error: Exception) -> tuple[Literal["oom", "error"], str]:
    """Status and error of the row of something that failed."""
    line = str(error).split("\n")[0]
    # For a CPU PyTorch has no error of its own.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in line:
        return "oom", line
    return "error", f"{type(error).__name__}: {line}"


class _Subject:
    """A kernel at a shape: its inputs, its times so far, and what went wrong."""

    def __init__(self, name: str, qkv: tuple[Tensor, Tensor, Tensor], do: Tensor, is_causal: bool) -> None:
        self.name, self.do, self.is_causal = name, do, is_causal
        self.qkv = [x.detach().requires_grad_() for x in qkv]  # one memory, gradients of its own
        self.times: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.status: Literal["ok", "oom", "error"] = "ok"
        self.error: str | None = None

    def attention(self) -> Tensor:
        kernel: Attention = get_attention(self.name)
        q, k, v = self.qkv
        return kernel(q, k, v, self.is_causal)

    def run(self, step: Callable[[], None]) -> None:
        """Do a step unless an earlier one failed; keep what goes wrong."""
        if self.status != "ok":
            return
        try:
            # The backward pass is timed many times over on one forward pass, which what torch.compile makes (flex)
            # refuses where it has donated buffers; it asks at compile time and at each backward pass.
            with functorch_config.patch(donated_buffer=False):
                step()
        except Exception as error:  # a kernel of others may raise anything; the other rows are wanted all the same
            self.status, self.error = _failure(error)
        if self.status != "ok":
            self.clear()
            gc.collect()
            if self.do.is_cuda:
                torch.cuda.empty_cache()

    def clear(self) -> None:
        for x in self.qkv:
            x.grad = None

    def first_call(self) -> None:
        """The first forward and backward pass, with what they compile, and then the memory of the second."""
        begin = time.perf_counter()
        self.attention().backward(self.do)
        _wait(self.do.device)
        self.facts["first_call_s"] = time.perf_counter() - begin
        self.clear()
        if self.do.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.do.device)
            before = torch.cuda.memory_allocated(self.do.device)
            self.attention().backward(self.do)
            outputs = 4 * self.do.numel() * self.do.element_size()  # o and three gradients
            peak = torch.cuda.max_memory_allocated(self.do.device) - before
            self.facts["extra_memory_bytes"] = max(0, peak - outputs)
            self.clear()

    def time_all(self, warmup_ms: float, rep_ms: float) -> None:
        o = self.attention()
        works: dict[str, Callable[[], Any]] = {
            "forward_ms": self.attention,
            "backward_ms": lambda: o.backward(self.do, retain_graph=True),
            "forward_backward_ms": lambda: self.attention().backward(self.do),
            "forward_sum_backward_ms": lambda: self.attention().sum().backward(),
        }
        for name, work in works.items():
            self.times.setdefault(name, []).extend(time_ms(work, self.do.device, warmup_ms, rep_ms, self.qkv))
        self.clear()

    def row(self, config: dict[str, Any]) -> Row:
        metrics: dict[str, Any] = dict(self.facts)
        if self.status == "ok":
            for name, times in self.times.items():
                # Forward 2 products, backward 5: what a kernel computes again is not counted.
                products = {"forward_ms": 2, "backward_ms": 5}.get(name, 7)
                flops = attention_flops(self.do.shape, self.do.shape[-2], self.is_causal, products)
                metrics[name] = summarise(times)
                metrics[name.removesuffix("_ms") + "_tflops"] = flops / metrics[name]["p50"] / 1e9
        return Row(case=CASE, variant=self.name, config=config, status=self.status, metrics=metrics, error=self.error)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parse_shapes(texts: Sequence[str]) -> tuple[tuple[int, int, int, int], ...]:
    """Shapes written as BxHxNxD. Raises ValueError naming what is not one."""
    shapes = []
    for text in texts:
        parts = text.lower().split("x")
        # Ten digits are enough, and more than some thousand are too many for int().
        if len(parts) != 4 or not all(
            re.fullmatch(r"\d{1,10}", part) and 0 < int(part) < _SIZE_LIMIT for part in parts
        ):
            raise ValueError(
                f"shapes has {text!r}: each must be BxHxNxD, such as 1x16x1024x64, of numbers from 1 to 2^31 - 1"
            )
        b, h, n, d = map(int, parts)
        shapes.append((b, h, n, d))
    return tuple(shapes)
