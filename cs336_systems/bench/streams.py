"""What ran when on a GPU in one step: kernels that compute and kernels that communicate, and how much they overlap."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from .intervals import Interval, merge
from .trace import Event, gpu_events, read_trace


def record_step(step: Callable[[], Any], path: Path | None, device: torch.device) -> None:
    """Call `step` twice, the second time under the profiler, and write its `step_intervals` as JSON.

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
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        found = step_intervals(read_trace(trace))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))


def step_intervals(events: Iterable[Event]) -> dict[str, list[Interval]]:
    """The `intervals` of a trace: what the GPU did and is not communication, copies too, counts as computing."""
    return intervals((event["name"], event["ts"], event["ts"] + event["dur"]) for event in gpu_events(events))


def intervals(kernels: Iterable[tuple[str, float, float]]) -> dict[str, list[Interval]]:
    """Kernels (name, start, end in us) as merged intervals of `compute` and `communication`, in ms from the first."""
    kernels = list(kernels)
    first = min((start for _, start, _ in kernels), default=0.0)
    found: dict[str, list[Interval]] = {"compute": [], "communication": []}
    for name, start, end in kernels:
        kind = "communication" if "nccl" in name.lower() else "compute"
        found[kind].append((round((start - first) / 1e3, 3), round((end - first) / 1e3, 3)))
    return {kind: merge(spans) for kind, spans in found.items()}
