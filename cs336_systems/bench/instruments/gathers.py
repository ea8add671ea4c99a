"""Finds FSDP's all-gathers in a profiler's trace, and whether each ends before its layer needs the weights.

FSDP puts a named range around the start of each gather and around the wait for it. On a GPU the stream waits, not the
host: a kernel launched after the wait runs when the gather has ended and the GPU is free.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from .trace import Event, Interval, communicates, gpu_events, launched, thread_of

_GATHER, _WAIT, _GLOO = "gather of ", "wait for gather of ", "gloo:all_gather"


def gathers_of(events: Sequence[Event]) -> dict[str, Any]:
    """The gathers of a step in the order of their waits, how many ended in time, and the total stall: metrics of a row.

    A gather's `turn` is 1 in the forward pass, and 2 in the backward pass if its unit is gathered again. `slack_ms` is
    the time from its end until its weights could first be used; if it is negative, the layer's first work waited for
    the gather, `stall_ms` long. On a GPU, weights could first be used when the previous kernel has ended and the kernel
    that needs them is launched; a gather without work after it is left out. On a CPU, they could be used when the host
    reaches the wait.
    """
    # The trace repeats the ranges on the GPU, in categories that begin with gpu_.
    ranges = [e for e in events if e.get("ph") == "X" and not str(e.get("cat", "")).startswith("gpu_")]
    starts, waits = _by_unit(ranges, _GATHER), _by_unit(ranges, _WAIT)
    work = _OnGPU(events) if gpu_events(events) else _OnCPU(events, itertools.chain.from_iterable(starts.values()))
    found: list[tuple[float, dict[str, Any]]] = []
    for unit, its in waits.items():
        for turn, (start, wait) in enumerate(zip(starts.get(unit, []), its, strict=False), start=1):
            transfer, ready = work.transfer(start), work.ready(wait)
            if transfer is not None and ready is not None:
                begin, end = transfer
                slack = (ready - end) / 1e3
                times = {"ms": (end - begin) / 1e3, "slack_ms": slack, "stall_ms": max(0.0, -slack)}
                found.append((wait["ts"], {"unit": unit, "turn": turn, **times}))
    gathers = [gather for _, gather in sorted(found, key=lambda each: each[0])]
    return {
        "gathers": gathers,
        "gathers_in_time": sum(gather["slack_ms"] >= 0 for gather in gathers),
        "gathers_counted": len(gathers),
        "stall_ms": sum(gather["stall_ms"] for gather in gathers),
    }


def _by_unit(ranges: Iterable[Event], prefix: str) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in sorted(ranges, key=lambda event: event["ts"]):
        if event["name"].startswith(prefix):
            found.setdefault(event["name"].removeprefix(prefix), []).append(event)
    return found


class _OnCPU:
    """gloo's transfers, which its threads carry out in the order of the requests."""

    def __init__(self, events: Iterable[Event], starts: Iterable[Event]) -> None:
        transfers = sorted((e for e in events if e["name"] == _GLOO), key=lambda event: event["ts"])
        self._of: dict[float, Event] = {}
        for start in sorted(starts, key=lambda event: event["ts"]):
            while transfers and transfers[0]["ts"] < start["ts"]:
                transfers.pop(0)  # of another collective
            if transfers:
                self._of[start["ts"]] = transfers.pop(0)

    def transfer(self, start: Event) -> Interval | None:
        event = self._of.get(start["ts"])
        return None if event is None else _span(event)

    def ready(self, wait: Event) -> float | None:
        return wait["ts"]


class _OnGPU:
    """Kernels by their launches."""

    def __init__(self, events: Sequence[Event]) -> None:
        kernels = list(launched(events))
        launches = [(launch["ts"], thread_of(launch), kernel) for kernel, launch in kernels if launch is not None]
        self._launched = sorted(launches, key=lambda each: each[0])
        self._computing = [(_stream(kernel), _span(kernel)) for kernel, _ in kernels if not _communicates(kernel)]

    def transfer(self, start: Event) -> Interval | None:
        """From the start of its first kernel to the end of its last."""
        begin, end = _span(start)
        spans = [
            _span(kernel)
            for moment, thread, kernel in self._launched
            if thread == thread_of(start) and begin <= moment <= end and _communicates(kernel)
        ]
        return (min(spans)[0], max(end for _, end in spans)) if spans else None

    def ready(self, wait: Event) -> float | None:
        """When the first kernel launched after the wait could have started without the gather."""
        for launch, thread, kernel in self._launched:
            if thread == thread_of(wait) and launch >= _span(wait)[1] and not _communicates(kernel):
                stream, start = _stream(kernel), kernel["ts"]
                before = [span for on, span in self._computing if on == stream and span[0] < start]
                return max(launch, max(before)[1]) if before else launch
        return None


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _communicates(kernel: Event) -> bool:
    return communicates(kernel) or "DtoD" in kernel["name"]  # a gather by copies has one of the rank's own part


def _stream(kernel: Event) -> tuple[Any, Any]:
    return kernel["args"].get("device"), kernel["args"].get("stream")
