"""Clocks for kernels and for steps.

Kernels are short: GPU events time them, with a cold cache (`time_ms`). Steps are long: the host's clock times them, and
the host waits until each is done (`Stopwatch`).
"""

import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_TICK_MS = 1e-3  # least duration of a call, because a coarse clock may measure 0
_WAIT_CYCLES = 4_000_000  # of a GPU, 2 ms or more: longer than a host takes to launch attention, forward and backward


def time_ms(
    work: Callable[[], Any],
    device: torch.device,
    warmup_ms: float,
    rep_ms: float,
    gradients_of: Sequence[Tensor] = (),
    host_time: bool = True,
) -> list[float]:
    """The time of each call of `work` in ms: about `rep_ms` of calls after about `warmup_ms` of warm-up, at least one.

    A call that takes longer than both together is made only once. On a GPU, events surround each call, and the L2 cache
    is flushed before it, as in Triton's `do_bench`; the flush (0.1 ms) counts towards the two windows, but not towards
    a call's time. Host time counts as far as the flush does not hide it. On a CPU, the clock surrounds each call.
    gradients_of: tensors whose gradients are set to None before each call, so that nothing accumulates. host_time:
    false lets a GPU wait before each call until the host has queued it, so that the host's time does not count.
    """
    measure = partial(_gpu_times, host_time=host_time) if device.type == "cuda" else _cpu_times
    (first,), period = measure(work, 1, gradients_of, device)
    if first > warmup_ms + rep_ms:
        return [first]
    if first <= rep_ms:
        _, period_of_more = measure(work, 4, gradients_of, device)  # the first call may be a hiccup of the host
        period = min(period, period_of_more)
    period = max(_TICK_MS, period)
    measure(work, int(warmup_ms / period), gradients_of, device)
    return measure(work, max(1, int(rep_ms / period)), gradients_of, device)[0]


def timer(device: torch.device, host_time: bool = True) -> str:
    """The method of `time_ms` on a device, for the row."""
    if device.type == "cuda":
        queued = "" if host_time else " and the host ahead"
        return f"CUDA events around each call, the L2 cache flushed before it{queued}"
    return "time.perf_counter around each call"


def _gpu_times(
    work: Callable[[], Any], count: int, gradients_of: Sequence[Tensor], device: torch.device, host_time: bool = True
) -> tuple[list[float], float]:
    """The time of each call, and the shortest time of a flush and a call together, and of the wait if there is one."""
    flush = torch.empty(2**28, dtype=torch.int8, device=device)  # larger than any L2 cache
    calls = [[torch.cuda.Event(enable_timing=True) for _ in range(3)] for _ in range(count)]
    for before, begin, end in calls:
        for x in gradients_of:
            x.grad = None
        before.record()
        if not host_time:
            torch.cuda._sleep(_WAIT_CYCLES)
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
    """Wait until a GPU has done all its work; on a CPU, return at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times laps of work, each until the device has finished it. Starts when it is made."""

    METHOD = "timeit.default_timer around work; on a GPU it ends in torch.cuda.synchronize()"

    def __init__(self, device: torch.device, clock: Callable[[], float] = timeit.default_timer) -> None:
        self._device, self._clock = device, clock
        wait_for(device)
        self._last = clock()

    def lap_ms(self) -> float:
        """Wait for the device; return the ms since the last lap or the start."""
        wait_for(self._device)
        now = self._clock()
        elapsed, self._last = now - self._last, now
        return elapsed * 1e3
