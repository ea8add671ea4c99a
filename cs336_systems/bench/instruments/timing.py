"""Times a piece of work many times, on a GPU or a CPU.

Kernels are short: events on the GPU time them, with a cold cache (`time_ms`). Steps are long: the host's clock times
them, and the host waits for the work to be done (`Stopwatch`).
"""

import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_TICK_MS = 1e-3  # a call counts as this long at least: by a coarse clock it may take 0


def time_ms(
    work: Callable[[], Any], device: torch.device, warmup_ms: float, rep_ms: float, gradients_of: Sequence[Tensor] = ()
) -> list[float]:
    """The time of each call of `work` in ms, over about `rep_ms` after about `warmup_ms`; at least one call.

    If one call takes longer than both together, it is not repeated: earlier work, or the call itself, has warmed it up.

    On a GPU: events around each call, with the L2 cache flushed before it, as Triton's `do_bench` does; the flush,
    about 0.1 ms, is part of the windows but of no call's time. Host time counts as far as the flush does not hide it.
    On a CPU: the clock around each call. The gradients of the tensors in `gradients_of` are set to None before each
    call, so that nothing is accumulated.
    """
    measure = _gpu_times if device.type == "cuda" else _cpu_times
    (first,), period = measure(work, 1, gradients_of, device)
    if first > warmup_ms + rep_ms:
        return [first]
    if first <= rep_ms:
        _, of_more = measure(work, 4, gradients_of, device)  # one alone may be the host's hiccup
        period = min(period, of_more)
    period = max(_TICK_MS, period)
    measure(work, int(warmup_ms / period), gradients_of, device)
    return measure(work, max(1, int(rep_ms / period)), gradients_of, device)[0]


def timer(device: torch.device) -> str:
    """How `time_ms` measures on a device, for the row."""
    if device.type == "cuda":
        return "CUDA events around each call, the L2 cache flushed before it"
    return "time.perf_counter around each call"


def _gpu_times(
    work: Callable[[], Any], count: int, gradients_of: Sequence[Tensor], device: torch.device
) -> tuple[list[float], float]:
    """The time of each call, and the shortest time from before one flush to before the next."""
    flush = torch.empty(2**28, dtype=torch.int8, device=device)  # larger than any L2 cache
    calls = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(count)]
    for before, begin, end in calls:
        for x in gradients_of:
            x.grad = None
        before.record()
        flush.zero_()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    periods = [before.elapsed_time(end) for before, _, end in calls]
    return [begin.elapsed_time(end) for _, begin, end in calls], min(periods, default=0.0)


def _cpu_times(
    work: Callable[[], Any], count: int, gradients_of: Sequence[Tensor], device: torch.device
) -> tuple[list[float], float]:
    """The time of each call, and the shortest."""
    times = []
    for _ in range(count):
        for x in gradients_of:
            x.grad = None
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times, min(times, default=0.0)


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all work so far; on a CPU, return at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times laps of work on a device, each until the device is done with it. Starts at once."""

    METHOD = "timeit.default_timer around work that ends in torch.cuda.synchronize()"

    def __init__(self, device: torch.device, clock: Callable[[], float] = timeit.default_timer) -> None:
        self._device, self._clock = device, clock
        wait_for(device)
        self._last = clock()

    def lap_ms(self) -> float:
        """Wait for the device; return the time since the start or the last lap, in ms."""
        wait_for(self._device)
        now = self._clock()
        elapsed, self._last = now - self._last, now
        return elapsed * 1e3
