"""Ranges that name work in the traces of `torch.profiler`, their events, and intervals of time."""

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Event = dict[str, Any]
Interval = tuple[float, float]
"""Start and end."""

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name the work inside for PyTorch's profiler and, by NVTX, for Nsight Systems. Otherwise it costs microseconds."""
    on_gpu = torch.cuda.is_initialized()
    with torch.profiler.record_function(name):
        if on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()


def read_trace(path: Path) -> list[Event]:
    """The events of a Chrome trace, .json or .json.gz."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        return json.loads(file.read())["traceEvents"]


def gpu_events(events: Iterable[Event]) -> list[Event]:
    """The GPU's kernels, copies and memsets, without the ranges of `record_function`, in which the GPU may be idle."""
    return [event for event in events if event.get("cat") in _GPU_CATEGORIES and event.get("ph") == "X"]


def communicates(kernel: Event) -> bool:
    """Whether one of the `gpu_events` is NCCL's or a copy between GPUs."""
    return "nccl" in kernel["name"].lower() or "PtoP" in kernel["name"]


def launched(events: Sequence[Event]) -> Iterator[tuple[Event, Event | None]]:
    """Each of the `gpu_events` and its launch on the host, which has the same `correlation`; None if it is missing."""
    launches: dict[Any, Event] = {}
    for event in events:
        if event.get("cat") in _LAUNCH_CATEGORIES:
            launches.setdefault(event.get("args", {}).get("correlation"), event)
    for event in gpu_events(events):
        yield event, launches.get(event.get("args", {}).get("correlation"))


def thread_of(event: Event) -> tuple[Any, Any]:
    """Process and thread of an event on the host."""
    return event.get("pid"), event.get("tid")


def merge(spans: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The union of spans, in order; spans at most `gap` apart become one."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """Length of the intersection of two lists of merged spans."""
    a, b, total = list(a), list(b), 0.0
    i = j = 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: Iterable[Interval]) -> float:
    """Total length of merged spans."""
    return sum(end - start for start, end in spans)
