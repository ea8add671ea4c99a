"""The case `leaderboard-2025`: the timing of the assignment's FlashAttention leaderboard of 2025, kernel by kernel.

Code and sizes are the handout's: causal bf16 attention of 16 heads, length 16,384 and head size 64; forward, sum,
backward. Its q, k and v are parts of one tensor whose gradient accumulates from call to call; the time includes that.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...config.checks import check_types, require
from ...kernels.attention import get_attention
from ...kernels.attention.contract import attention_flops
from ...machine.hardware import DTYPES, use_device
from ...training.metrics import summarise
from ..attention import WORKS, check_kernel, check_sizes, resolve_device
from ..case import Case, swept
from ..instruments.timing import time_ms, wait_for
from ..outcome import each

HANDOUT_TIMER = (
    "triton.testing.do_bench(flash_forward_backward, rep={rep_ms:g}, warmup={warmup_ms:g}): "
    "the handout's, which prints the mean"
)
CPU_TIMER = "the host's clock around each call, over {rep_ms:g} ms after {warmup_ms:g}: do_bench needs a GPU"


@dataclass(frozen=True, kw_only=True)
class LeaderboardBench:
    """A kernel at the leaderboard's sizes."""

    # Not flex: compiled once more, as the handout compiles, it was not done with its first call after 220 s.
    kernel: str = swept("flash_triton", "sdpa", "sdpa_flash", "sdpa_cudnn", quick=("naive", "sdpa"), also="kernels")
    """Attention kernel by its registered name. `flex` compiles itself: measure it with compile false."""
    num_heads: int = swept(16, quick=2)
    """Number of heads; there is no batch."""
    length: int = swept(16384, quick=64)
    """Number of queries and of keys."""
    head_size: int = swept(64, quick=16)
    """Length of each query, key and value vector."""
    dtype: Literal["bf16", "fp16", "fp32"] = swept("bf16", quick="fp32")
    """Type of q, k and v."""
    compile: bool = swept(True, sweep=(True, False), quick=False)
    """Use torch.compile around the kernel, as in the handout."""
    rep_ms: float = swept(10_000.0, quick=2.0)
    """Time for measuring."""
    warmup_ms: float = swept(1_000.0, quick=0.0)
    """Time for warming up."""
    device: str = swept("auto", quick="cpu")
    """auto, cpu, cuda or cuda:N; auto takes the GPU if there is one."""

    def __post_init__(self) -> None:
        check_types(self, "")
        check_kernel(self.kernel)
        for name in ("rep_ms", "warmup_ms"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "at least 0 and finite")
        check_sizes(self, "num_heads", "length", "head_size")
        object.__setattr__(self, "device", resolve_device(self.device))


def measure(config: LeaderboardBench) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran, and its metrics; `forward_sum_backward_ms.mean` is what the handout prints."""
    device = use_device(config.device)
    torch.manual_seed(0)
    shape, dtype = (config.num_heads, config.length, config.head_size), DTYPES[config.dtype]
    q, k, v = torch.randn(3, *shape, device=device, dtype=dtype, requires_grad=True)
    kernel = get_attention(config.kernel)
    flash = torch.compile(kernel) if config.compile else kernel

    def flash_forward_backward() -> None:
        o = flash(q, k, v, True)
        loss = o.sum()
        loss.backward()

    begin = time.perf_counter()
    flash_forward_backward()
    wait_for(device)
    first_call_s = time.perf_counter() - begin
    metrics: dict[str, Any] = {"first_call_s": first_call_s}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        flash_forward_backward()  # outside do_bench, which has a quarter of a GiB to flush the cache with
        metrics["peak_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    times, timer = _times(flash_forward_backward, config, device)
    metrics |= {"forward_sum_backward_ms": summarise(times), "calls": len(times), "timer": timer}
    flops = attention_flops(q.shape, k.shape[-2], True, WORKS["forward_sum_backward"])
    metrics["forward_sum_backward_tflops"] = flops / metrics["forward_sum_backward_ms"]["mean"] / 1e9
    ran = dict(zip(("num_heads", "length", "head_size"), q.shape, strict=True))
    ran |= {"compile": hasattr(flash, "_torchdynamo_orig_callable"), "device": str(device)}
    return ran, metrics


def _times(work: Callable[[], None], config: LeaderboardBench, device: torch.device) -> tuple[list[float], str]:
    """The time of each call in ms, and what measured it."""
    warmup_ms, rep_ms = config.warmup_ms, config.rep_ms
    if device.type != "cuda":
        return time_ms(work, device, warmup_ms, rep_ms), CPU_TIMER.format(rep_ms=rep_ms, warmup_ms=warmup_ms)
    from triton.testing import do_bench

    # The handout uses the default of return_mode, the mean of these.
    times = do_bench(work, rep=rep_ms, warmup=warmup_ms, return_mode="all")
    return times, HANDOUT_TIMER.format(rep_ms=rep_ms, warmup_ms=warmup_ms)


def variant(config: LeaderboardBench) -> str:
    """The kernel, marked eager if there is no compilation around it."""
    return config.kernel if config.compile else f"{config.kernel} eager"


CASE = Case(
    name="leaderboard-2025",
    about="The FlashAttention leaderboard of 2025: forward, sum and backward as the handout times them.",
    module=__name__,
    config=LeaderboardBench,
    variant=variant,
    measure=each("leaderboard-2025", variant, measure),
    isolated=True,
)
