"""The compute and communication streams of one step, and their overlap.

On a GPU, work is kernels and copies. On a CPU, it is PyTorch's operators and the transfers in gloo's threads.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .trace import Event, Interval, communicates, gpu_events, length, merge, overlap, read_trace

KINDS = ("compute", "communication")
Streams = dict[str, list[Interval]]
"""Merged intervals of each of KINDS, in ms."""


class Piece(NamedTuple):
    """A piece of work: its name, its kind (one of KINDS), and its start and end in us."""

    name: str
    kind: str
    start_us: float
    end_us: float


def profile_step(step: Callable[[], Any], is_profiled: bool, device: torch.device, host: bool = True) -> list[Event]:
    """Call `step` twice, the second time under the profiler; return the events of its trace.

    All ranks of a run call it together; ranks that are not profiled get no events. host: also record PyTorch's
    operators on a GPU, which slows the host.
    """
    step()
    if not is_profiled:
        step()
        return []
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] if host or not on_gpu else []
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if on_gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory(prefix="cs336-") as folder:
        trace = Path(folder, "trace.json")
        profile.export_chrome_trace(str(trace))
        return read_trace(trace)


def record_step(
    step: Callable[[], Any], is_profiled: bool, device: torch.device, path: Path | None = None, named: bool = False
) -> Streams:
    """The streams of a step, from `profile_step`; {} on ranks that are not profiled.

    path: a JSON file for the streams. named: the file also gets each piece of work with its name, for a page that
    shows names under the pointer.
    """
    events = profile_step(step, is_profiled, device, host=False)
    if not is_profiled:
        return {}
    found = gpu_pieces(events) if device.type == "cuda" else cpu_pieces(events)
    streams = streams_of(found)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(streams | (by_name(found) if named else {})))
    return streams


def gpu_pieces(events: Iterable[Event]) -> list[Piece]:
    """The GPU's work: NCCL's kernels and copies between GPUs are communication; the rest is compute."""
    return [
        Piece(event["name"], KINDS[communicates(event)], event["ts"], event["ts"] + event["dur"])
        for event in gpu_events(events)
    ]


def cpu_pieces(events: Iterable[Event]) -> list[Piece]:
    """PyTorch's outermost operators, and the transfers of gloo's threads."""
    found = []
    ends: dict[Any, float] = {}
    for event in sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        if event["name"].startswith("gloo:"):
            found.append(Piece(event["name"], "communication", event["ts"], end))
        elif event["name"].startswith("aten::") and event["ts"] >= ends.get(event["tid"], -1.0):
            ends[event["tid"]] = end
            found.append(Piece(event["name"], "compute", event["ts"], end))
    return found


def streams_of(found: Sequence[Piece]) -> Streams:
    """Merged intervals of compute and communication, in ms from the first piece."""
    first = _first(found)
    return {kind: merge(_ms(each, first) for each in found if each.kind == kind) for kind in KINDS}


def by_name(found: Sequence[Piece]) -> dict[str, Any]:
    """The names, and by kind each piece as [index of its name, start, end] in ms from the first piece."""
    first, names = _first(found), list(dict.fromkeys(each.name for each in found))
    number = {name: i for i, name in enumerate(names)}
    lanes = {kind: [[number[p.name], *_ms(p, first)] for p in found if p.kind == kind] for kind in KINDS}
    return {"names": names, "pieces": lanes}


def _first(found: Sequence[Piece]) -> float:
    return min((piece.start_us for piece in found), default=0.0)


def _ms(piece: Piece, first: float) -> Interval:
    return round((piece.start_us - first) / 1e3, 3), round((piece.end_us - first) / 1e3, 3)


def totals(streams: Streams) -> dict[str, float | None]:
    """Times in ms (first to last, computing, communicating, both), and the share of communication that overlaps."""
    compute, communication = (streams[kind] for kind in KINDS)
    both, sent = overlap(compute, communication), length(communication)
    return {
        "span_ms": max((end for spans in streams.values() for _, end in spans), default=0.0),
        "compute_ms": length(compute),
        "communication_ms": sent,
        "both_ms": both,
        "overlapped": both / sent if sent else None,
    }
