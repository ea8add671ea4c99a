"""Kernels from a trace, each with its phase and its range of attention.

On a GPU, work runs after the host has launched it, so a kernel belongs to the range that contains its launch; kernel
and launch have the same `correlation`. The backward pass is launched by a thread of its own. Its phase is decided by
time alone. Its range of attention is that of the forward operation that it differentiates, according to the links
(`fwdbwd`) that the profiler draws from autograd's sequence numbers.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..instruments.trace import Event, launched, thread_of
from ..workload import PHASES

OUTSIDE = "outside"
SCORES, SOFTMAX, VALUES = "attention scores", "attention softmax", "attention values"
ATTENTION_RANGES = (SCORES, SOFTMAX, VALUES)
# Autograd's own work around its operators is host time, as is Python's.
_AUTOGRAD = re.compile(r"^autograd::engine|torch::autograd::|Backward\d*$|^TorchDynamo|^AOTDispatcher|^Pregraph")

Thread = tuple[Any, Any]


@dataclass(frozen=True)
class Kernel:
    """A kernel, copy or memset on a GPU; on a CPU an operator, without the operators that it calls.

    `phase` is one of PHASES or OUTSIDE, `part` one of ATTENTION_RANGES or None. On a CPU `duration_us` is the
    operator's own time, which may lie in pieces.
    """

    name: str
    start_us: float
    duration_us: float
    phase: str
    part: str | None = None
    stream: str = ""


def gpu_kernels(events: Sequence[Event]) -> list[Kernel]:
    """All work of the GPU, in order of time. Raises RuntimeError for a trace without any kernel."""
    ranges = _Ranges(events)
    found = []
    for event, launch in launched(events):
        args = event.get("args", {})
        phase, part = (OUTSIDE, None) if launch is None else ranges.of(launch)
        stream = f"{args.get('device')}:{args.get('stream')}"
        found.append(Kernel(event["name"], event["ts"], event["dur"], phase, part, stream))
    if not found:
        raise RuntimeError("the profiler has recorded no GPU kernels: CUPTI, which it needs, cannot be used here")
    return sorted(found, key=lambda kernel: kernel.start_us)


def cpu_kernels(events: Sequence[Event]) -> list[Kernel]:
    """The operators that a CPU ran, in order of time, each with its own time, without the operators that it calls.

    The loops that TorchInductor generates for a CPU have no names; they count as the own time of its graphs.
    """
    ranges = _Ranges(events)
    operators = [event for event in events if event.get("cat") == "cpu_op" and event.get("ph") == "X"]
    operators.sort(key=lambda event: (event["ts"], -event["dur"]))
    own = [float(event["dur"]) for event in operators]
    open_calls: dict[Thread, list[int]] = {}
    for i, event in enumerate(operators):
        stack = open_calls.setdefault(thread_of(event), [])
        while stack and event["ts"] >= operators[stack[-1]]["ts"] + operators[stack[-1]]["dur"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= event["dur"]
        stack.append(i)
    return [
        Kernel(event["name"], event["ts"], max(0.0, time), *ranges.of(event))
        for event, time in zip(operators, own, strict=True)
        if not _AUTOGRAD.search(event["name"])
    ]


class _Spans:
    """Named spans of time on several threads, one after the other on each thread."""

    def __init__(self, spans: Iterable[tuple[Thread, float, float, str]]) -> None:
        self._of: dict[Thread, list[tuple[float, float, str]]] = {}
        for thread, start, length, name in spans:
            self._of.setdefault(thread, []).append((start, start + length, name))
        for found in self._of.values():
            found.sort()

    def at(self, thread: Thread, moment: float) -> str | None:
        """The name of the span at that moment; None between spans."""
        spans = self._of.get(thread, [])
        i = bisect_right(spans, moment, key=lambda span: span[0])
        return spans[i - 1][2] if i and moment <= spans[i - 1][1] else None


class _Ranges:
    """Finds the phase and the range of attention of an event on the host."""

    _ANY: Thread = (None, None)

    def __init__(self, events: Sequence[Event]) -> None:
        named = [event for event in events if event.get("cat") == "user_annotation"]
        self._phases = _Spans((self._ANY, e["ts"], e["dur"], e["name"]) for e in named if e["name"] in PHASES)
        self._parts = _Spans(
            (thread_of(e), e["ts"], e["dur"], e["name"]) for e in named if e["name"] in ATTENTION_RANGES
        )
        self._differentiated = _Spans(self._backward_nodes(events))

    def _backward_nodes(self, events: Sequence[Event]) -> Iterator[tuple[Thread, float, float, str]]:
        """Backward operations: thread, start, duration, and the range of their forward operations."""
        links = [event for event in events if event.get("cat") == "fwdbwd"]
        forward = {event["id"]: self._parts.at(thread_of(event), event["ts"]) for event in links if event["ph"] == "s"}
        backward = {(thread_of(event), event["ts"]): forward.get(event["id"]) for event in links if event["ph"] == "f"}
        for event in events:
            if event.get("cat") == "cpu_op" and event.get("ph") == "X":
                part = backward.get((thread_of(event), event["ts"]))
                if part is not None:
                    yield thread_of(event), event["ts"], event["dur"], part

    def of(self, event: Event) -> tuple[str, str | None]:
        """Phase and range of attention of an operator or a launch."""
        thread, moment = thread_of(event), event["ts"]
        part = self._parts.at(thread, moment) or self._differentiated.at(thread, moment)
        return self._phases.at(self._ANY, moment) or OUTSIDE, part
