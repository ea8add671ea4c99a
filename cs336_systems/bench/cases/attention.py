"""Attention kernels by themselves, in five presets that are commands of their own.

- `flash`, the handout's flash_benchmarking: kernels over lengths and head sizes at batch 1, causal, in bf16 and fp32.
- `kernels`: kernels at the shapes of published figures (table in docs/one-gpu.md).
- `attention-sweep`: the forward pass at square and rectangular numbers of queries and keys.
- `attention`, the handout's pytorch_attention and torch_compile: eager and compiled passes, and the memory between
  them. The handout leaves the mask open; here it is causal.
- `leaderboard-2025`, the assignment's FlashAttention leaderboard, with the handout's code. q, k and v are parts of one
  tensor whose gradient accumulates from call to call, and the time includes that.

The kernels of the first three take turns (`instruments/kernel_turns.py`).
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from cs336_basics.attention import Documents

from ...config.checks import check_types, is_import_path, require, require_at_least, without_groups
from ...kernels.attention import ATTENTION, get_attention
from ...kernels.attention.contract import attention_flops
from ...machine.hardware import DTYPES, select_device, use_device
from ...planner.accounting import naive_attention_bytes
from ..case import Case, swept
from ..instruments.kernel_turns import PRODUCTS, take_turns, timed
from ..instruments.timing import Stopwatch, time_ms, wait_for
from ..outcome import each
from ..row import Row

KERNELS = tuple(name for name in ATTENTION if name not in ("scaled_dot_prod_attention", "flash_attention_triton"))
QUICK_KERNELS = ("naive", "vectorized_torch", "flash_torch", "sdpa")
"""Kernels that are quick on a CPU; Triton's interpreter is slow."""
SHAPES = (
    (1, 16, 1024, 64),
    (4, 25, 1024, 64),
    (8, 16, 4096, 64),
    (1, 16, 8192, 64),
    (1, 16, 16384, 64),
    (1, 16, 16384, 128),
    (1, 16, 65536, 64),
)
SQUARES = tuple((n, n) for n in (128, 256, 512, 1024, 2048))
RECTANGLES = ((128, 2048), (512, 2048), (2048, 128), (2048, 512))
_SIXTEEN_BITS_ONLY = ("sdpa_flash", "sdpa_cudnn", "fa4")
_SIZE_LIMIT = 1 << 31


def parse_sizes(text: str, name: str, form: str, separator: str, count: int) -> tuple[int, ...]:
    """Parse sizes from the command line. Raises ValueError naming field, value and form."""
    parts = text.lower().split(separator)
    are_numbers = all(re.fullmatch(r"\d{1,10}", part, re.ASCII) for part in parts)  # int() refuses thousands of digits
    if len(parts) != count or not are_numbers or not all(0 < int(part) < _SIZE_LIMIT for part in parts):
        raise ValueError(f"{name} is {text!r}: it must be {form}, of numbers from 1 to 2^31 - 1")
    return tuple(map(int, parts))


parse_shape = partial(parse_sizes, name="shape", form="BxHxNxD, such as 1x16x1024x64", separator="x", count=4)
parse_tier = partial(parse_sizes, name="tier", form="QUERIES:KEYS, such as 256:128", separator=":", count=2)


class AttentionBench:
    """A kernel at a shape. Presets redeclare the fields that they vary; the other fields keep the values here."""

    kernel: str = "naive"
    """Attention kernel by its registered name."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Type of q, k and v."""
    is_causal: bool = True
    """Whether query i sees only the keys up to i."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""
    compile: bool = False
    """Use torch.compile."""
    rounds: int = 1
    """Number of rounds in which the kernels take turns."""
    warmup_ms: float = 0.0
    """Time for warming up before each measurement."""
    rep_ms: float = 0.0
    """Time for each measurement."""
    host_time: bool = True
    """Whether the host's time for launching counts. false: the GPU waits 2 ms before each call while the host queues
    it."""
    warmup: int = 0
    """Passes before the measured ones."""
    repeats: int = 1
    """Number of measured forward passes, and of backward passes."""
    shape: tuple[int, int, int, int] = (1, 1, 1, 1)
    """BxHxNxD of q, k and v: batch, heads, length, head size."""
    tier: tuple[int, int] = (1, 1)
    """QUERIES:KEYS, such as 256:128 (default: squares from 128 to 2048 and four rectangles)."""
    batch_size: int = 1
    """Sequences per batch."""
    num_heads: int = 1
    """Number of heads."""
    length: int = 1
    """Number of queries and of keys."""
    head_size: int = 1
    """Length of each query, key and value vector."""

    dimensions = ("batch_size", "length", "head_size")
    """Fields that are the shape of q, k and v."""

    def __post_init__(self) -> None:
        check_types(self, "")
        if is_import_path(self.kernel):
            with without_groups({"model.attention": "kernel"}):
                get_attention(self.kernel)
        else:  # a registered kernel may still fail to import: that is a row of status error
            accepted = f"one of {', '.join(ATTENTION)}, or module:function"
            require(self.kernel in ATTENTION, "kernel", self.kernel, accepted)
        require_at_least(self, "", 1, "rounds", "repeats")
        require_at_least(self, "", 0, "warmup", "warmup_ms", "rep_ms")
        for name in ("shape", "tier", "batch_size", "num_heads", "length", "head_size"):
            value = getattr(self, name)
            sizes = value if isinstance(value, tuple) else (value,)
            require(all(1 <= size < _SIZE_LIMIT for size in sizes), name, value, "from 1 to 2^31 - 1")
        with without_groups():
            object.__setattr__(self, "device", str(select_device(self.device)))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape of q, and the shape of k and v."""
        shape = tuple(getattr(self, name) for name in self.dimensions)
        return shape, shape

    def limits(self, device: torch.device) -> dict[str, Any]:
        """The further arguments of the kernel."""
        return {}

    def flops(self, products: int) -> int:
        """Operations of so many matrix products."""
        q, k = self.shapes
        return attention_flops(q, k[-2], self.is_causal, products)

    def check_output(self, o: Tensor) -> None:
        """Raise ValueError for an output of another type or shape than q's."""
        require(isinstance(o, Tensor), "output", type(o).__name__, "a tensor")
        require(o.shape == self.shapes[0], "output's shape", tuple(o.shape), f"{list(self.shapes[0])}")


@dataclass(frozen=True, kw_only=True)
class InTurnsBench(AttentionBench):
    """Fields of the presets whose kernels take turns."""

    kernel: str = swept(*KERNELS, quick=QUICK_KERNELS, also="kernels")
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", quick="fp32")
    is_causal: bool = swept(True, sweep=(True, False))
    device: str = swept("auto", quick="cpu")
    rounds: int = swept(3, quick=1)
    warmup_ms: float = swept(25.0, quick=0.0)
    rep_ms: float = swept(50.0, quick=1.0)


@dataclass(frozen=True, kw_only=True)
class FlashBench(InTurnsBench):
    """The preset `flash`: a kernel at a length and a head size, with one head per sequence."""

    kernel: str = swept(*(k for k in KERNELS if k != "fa4"), sweep=KERNELS, quick=QUICK_KERNELS, also="kernels")
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", "fp32", quick="fp32")
    rep_ms: float = swept(100.0, quick=1.0)  # as Triton's do_bench, and so is warmup_ms
    batch_size: int = swept(1)
    head_size: int = swept(16, 32, 64, 128, quick=16)
    length: int = swept(*(2**i for i in range(7, 17)), quick=(32, 64))


@dataclass(frozen=True, kw_only=True)
class KernelsBench(InTurnsBench):
    """The preset `kernels`: a kernel at a shape with batch and heads."""

    shape: tuple[int, int, int, int] = swept(
        *SHAPES, quick=((1, 2, 64, 16), (1, 2, 65, 32)), parse=parse_shape, also="shapes"
    )
    num_kv_heads: int | None = swept(None)
    """Heads of k and v, a divisor of q's (default: as many)."""
    window: int | None = swept(None)
    """Keys that a query sees at most (default: all)."""
    document_length: int | None = swept(None)
    """Tokens of each document, a divisor of the length (default: one document)."""
    host_time: bool = swept(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _, heads, length, _ = self.shape
        for name, whole, what in (("num_kv_heads", heads, "heads"), ("document_length", length, "length")):
            value = getattr(self, name)
            accepted = f"a divisor of {whole}, the {what} of shape {'x'.join(map(str, self.shape))}"
            require(value is None or (value > 0 and whole % value == 0), name, value, accepted)
        require_at_least(self, "", 1, "window")

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        batch, heads, *rest = self.shape
        return self.shape, (batch, self.num_kv_heads or heads, *rest)

    def limits(self, device: torch.device) -> dict[str, Any]:
        limits: dict[str, Any] = {} if self.window is None else {"window": self.window}
        if self.document_length is not None:
            numbers = torch.arange(self.shape[2], device=device) // self.document_length
            limits["documents"] = Documents.from_numbers(numbers.expand(self.shape[0], -1))
        return limits

    def flops(self, products: int) -> int:
        batch, heads, length, head_size = self.shape
        each = self.document_length or length
        documents = batch * (length // each), heads, each, head_size
        return attention_flops(documents, each, self.is_causal, products, self.window)


@dataclass(frozen=True, kw_only=True)
class AttentionSweepBench(InTurnsBench):
    """The preset `attention-sweep`: a kernel at a number of queries and a number of keys."""

    kernel: str = swept(
        "naive", "vectorized_torch", "flash_torch", "flash_triton", "sdpa", quick=QUICK_KERNELS, also="kernels"
    )
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", sweep=("bf16", "fp32"), quick="fp32")
    is_causal: bool = swept(False, sweep=(False, True))
    """Whether query i sees only the keys up to i; in a rectangle, some keys are then seen by no query."""
    tier: tuple[int, int] = swept(
        *SQUARES, *RECTANGLES, quick=((16, 16), (32, 32), (32, 16)), parse=parse_tier, also="tiers"
    )
    batch_size: int = swept(4, quick=1)
    num_heads: int = swept(16, quick=2)
    head_size: int = swept(64, quick=16)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        q, k = ((self.batch_size, self.num_heads, length, self.head_size) for length in self.tier)
        return q, k


@dataclass(frozen=True, kw_only=True)
class PlainBench(AttentionBench):
    """The preset `attention`: a kernel at a length and a head size, with one head per sequence, maybe compiled."""

    kernel: str = swept("naive", also="kernels")
    batch_size: int = swept(8, quick=2)
    head_size: int = swept(16, 32, 64, 128, quick=(8, 16))
    length: int = swept(
        256, 1024, 4096, 8192, 16384, sweep=(256, 1024, 4096, 8192, 16384, 32768, 65536), quick=(16, 32)
    )
    """Number of queries and of keys; --sweep adds 32,768, which fills a GPU of 140 GB, and 65,536, which does not."""
    compile: bool = swept(False, True, quick=False)
    is_causal: bool = swept(True, sweep=(True, False))
    dtype: Literal["bf16", "fp16", "fp32"] = swept("fp32")
    device: str = swept("auto", quick="cpu")
    warmup: int = swept(10, quick=1)
    repeats: int = swept(100, quick=3)


@dataclass(frozen=True, kw_only=True)
class LeaderboardBench(AttentionBench):
    """The preset `leaderboard-2025`: a kernel with heads and no batch."""

    # Without flex: compiled once more, as the handout compiles, its first call had not returned after 220 s.
    kernel: str = swept("flash_triton", "sdpa", "sdpa_flash", "sdpa_cudnn", quick=("naive", "sdpa"), also="kernels")
    """Attention kernel by its registered name. `flex` compiles itself: measure it with compile false."""
    num_heads: int = swept(16, quick=2)
    length: int = swept(16384, quick=64)
    head_size: int = swept(64, quick=16)
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", quick="fp32")
    compile: bool = swept(True, sweep=(True, False), quick=False)
    """Use torch.compile around the kernel, as in the handout."""
    rep_ms: float = swept(10_000.0, quick=2.0)
    warmup_ms: float = swept(1_000.0, quick=0.0)
    device: str = swept("auto", quick="cpu")

    dimensions = ("num_heads", "length", "head_size")


def measure_passes(config: PlainBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The preset `attention`: the configuration as it ran, times of its passes, and the memory between the two."""
    device = use_device(config.device)
    held = 0
    if device.type == "cuda":  # cuBLAS keeps a workspace per thread from its first product on: do not count that
        x = torch.ones(2, 2, device=device, requires_grad=True)
        (x @ x).sum().backward()
        del x
        held = torch.cuda.memory_allocated(device)
    attention: Any = get_attention(config.kernel)
    if config.compile:
        torch._dynamo.reset()  # otherwise the next size would be compiled for all sizes
        attention = torch.compile(attention, dynamic=False)
    torch.manual_seed(0)
    shape, dtype = config.shapes[0], DTYPES[config.dtype]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    do = torch.randn(shape, device=device, dtype=dtype)
    watch = Stopwatch(device)
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    in_use, o = 0, q
    for i in range(config.warmup + config.repeats):
        del o  # also frees the tensors that its forward pass saved
        q.grad = k.grad = v.grad = None
        watch.lap_ms()
        o = attention(q, k, v, config.is_causal)
        forward_ms = watch.lap_ms()
        if o.is_cuda:
            in_use = torch.cuda.memory_allocated(o.device)
        watch.lap_ms()
        o.backward(do)
        backward_ms = watch.lap_ms()
        if i >= config.warmup:
            times["forward"].append(forward_ms)
            times["backward"].append(backward_ms)
    config.check_output(o)
    metrics: dict[str, Any] = {"timer": Stopwatch.METHOD}
    for work, laps in times.items():
        metrics |= timed(config, work, laps)
    if device.type == "cuda":
        metrics["memory_before_backward_bytes"] = in_use - held
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device) - held
    is_compiled = hasattr(attention, "_torchdynamo_orig_callable")
    return {"repeats": len(times["forward"]), "device": str(device), "compile": is_compiled}, metrics


def measure_plain(case: Case, configs: Sequence[PlainBench]) -> Iterable[Row]:
    """Rows of the preset `attention`, each with the bytes that eager attention needs by count, even after an oom."""
    for row in each(measure_passes)(case, configs):
        if row.config["kernel"] == "naive":
            batch_size, length, on_gpu = row.config["batch_size"], row.config["length"], row.config["device"] != "cpu"
            sizes = {name: row.config[name] for name in ("head_size", "is_causal")}
            counted = naive_attention_bytes(batch_size, length, length, **sizes, on_gpu=on_gpu)
            row = replace(row, metrics={**row.metrics, "counted_bytes": counted})
        yield row


def measure_leaderboard(config: LeaderboardBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The preset `leaderboard-2025`; `forward_sum_backward_ms.mean` is the number that the handout prints."""
    device = use_device(config.device)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *config.shapes[0], device=device, dtype=DTYPES[config.dtype], requires_grad=True)
    kernel = get_attention(config.kernel)
    flash = torch.compile(kernel) if config.compile else kernel

    def flash_forward_backward() -> None:
        o = flash(q, k, v, True)
        loss = o.sum()
        loss.backward()

    begin = time.perf_counter()
    flash_forward_backward()
    wait_for(device)
    metrics: dict[str, Any] = {"first_call_s": time.perf_counter() - begin}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        flash_forward_backward()  # outside do_bench, which allocates a quarter of a GiB to flush the cache
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    times, method = handout_times(flash_forward_backward, config, device)
    metrics |= timed(config, "forward_sum_backward", times, per="mean")
    ran = {"compile": hasattr(flash, "_torchdynamo_orig_callable"), "device": str(device)}
    return ran, metrics | {"calls": len(times), "timer": method}


def handout_times(work: Callable[[], None], config: LeaderboardBench, device: torch.device) -> tuple[list[float], str]:
    """The time of each call in ms by the handout's do_bench, or on a CPU by the clock; and a text that says which."""
    rep, warmup = config.rep_ms, config.warmup_ms
    if device.type != "cuda":
        text = f"the host's clock around each call, over {rep:g} ms after {warmup:g}: do_bench needs a GPU"
        return time_ms(work, device, warmup, rep), text
    from triton.testing import do_bench

    call = f"triton.testing.do_bench(flash_forward_backward, rep={rep:g}, warmup={warmup:g})"
    # The handout leaves return_mode at its default, the mean of these.
    return do_bench(work, rep=rep, warmup=warmup, return_mode="all"), f"{call}: the handout's, which prints the mean"


def check_type(config: FlashBench) -> None:
    """Raise ValueError if the kernel does not compute in that type on that device."""
    is_wide = config.dtype == "fp32" and config.device != "cpu"
    is_served = not (is_wide and config.kernel in _SIXTEEN_BITS_ONLY)
    require(is_served, "kernel", config.kernel, f"none of {', '.join(_SIXTEEN_BITS_ONLY)} with dtype 'fp32'")


def _preset(name: str, config: type[AttentionBench], rows: Any, variant: Any, **fields: Any) -> Case:
    return Case(name=name, config=config, rows=rows, variant=variant, **fields)


def _in_turns(name: str, config: type[AttentionBench], *works: str, **fields: Any) -> Case:
    return _preset(name, config, take_turns(*works), attrgetter("kernel"), together=("kernel",), **fields)


_PLAIN = _preset("attention", PlainBench, measure_plain, lambda c: f"{c.kernel} {'compiled' if c.compile else 'eager'}")
_LEADERBOARD = _preset("leaderboard-2025", LeaderboardBench, each(measure_leaderboard),
                       lambda c: c.kernel if c.compile else f"{c.kernel} eager", isolated=True)  # fmt: skip
_CASES = (
    _in_turns("flash", FlashBench, "forward", "backward", "forward_backward", check=check_type),
    _in_turns("kernels", KernelsBench, *PRODUCTS),
    _in_turns("attention-sweep", AttentionSweepBench, "forward"),
    _PLAIN,
    _LEADERBOARD,
)
PRESETS = {case.name: case for case in _CASES}
