"""What ran when on a GPU in one step: kernels that compute and kernels that communicate, and how much they overlap."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]


def record_step(step: Callable[[], Any], path: Path | None, device: torch.device) -> None:
    """Call `step` twice, the second time under the profiler, and write its `intervals` as JSON, in ms.

    All ranks of a run call it together; those without a path only take part.
    """
    step()
    if path is None or device.type != "cuda":
        step()
        return
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    kernels = [(e.name, e.time_range.start, e.time_range.end) for e in profile.events() if _is_kernel(e)]
    path.write_text(json.dumps(intervals(kernels)))


def _is_kernel(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("comm:")


def intervals(kernels: Iterable[tuple[str, float, float]]) -> dict[str, list[Interval]]:
    """Kernels (name, start, end in us) as merged intervals of `compute` and `communication`, in ms from the first."""
    kernels = list(kernels)
    first = min((start for _, start, _ in kernels), default=0.0)
    found: dict[str, list[Interval]] = {"compute": [], "communication": []}
    for name, start, end in kernels:
        kind = "communication" if "nccl" in name.lower() else "compute"
        found[kind].append((round((start - first) / 1e3, 3), round((end - first) / 1e3, 3)))
    return {kind: merge(spans) for kind, spans in found.items()}


def merge(spans: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Spans in order, those that touch or are at most `gap` apart as one."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(a: Iterable[Interval], b: Iterable[Interval]) -> float:
    """For how long both were under way; each merged."""
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
    """How long they are together; merged."""
    return sum(end - start for start, end in spans)
