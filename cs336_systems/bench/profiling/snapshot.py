"""Memory snapshots as `torch.cuda.memory._dump_snapshot` writes them, read into plain data.

A snapshot has `segments`, the allocator's memory at the end, and for each device a trace of its actions before.
"""

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_IN_USE = ("active_allocated", "active_awaiting_free", "active_pending_free")


class Frame(NamedTuple):
    """A line of code in a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the trace; `frames` from the innermost outward."""

    action: str
    address: int
    size: int
    time_us: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Memory in use when the snapshot was taken; `size` is the requested size in bytes."""

    address: int
    size: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The actions of one device's allocator, in order, and the blocks in use at the end."""

    events: list[Event]
    blocks: list[Block]
    warnings: list[str] = field(default_factory=list)


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every import. Without one a pickle has nothing to call, so nothing in the file is executed."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it asks for {module}.{name}, but may hold plain data only")


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot of one device: the busiest, if there are several.

    Raises FileNotFoundError, or ValueError naming the file, if it is not a snapshot. Nothing in the file is executed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"snapshot {path} does not exist, or is no file")
    try:
        with path.open("rb") as file:
            return _converted(_PlainUnpickler(file).load())
    except Exception as error:  # damaged content can raise any
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"snapshot {path} is not a memory snapshot, or is damaged ({reason})") from error


def _converted(content: dict[str, Any]) -> Snapshot:
    """The events and blocks of the busiest device, from the content of the file."""
    traces = content["device_traces"]
    device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
    if not traces or not traces[device]:
        raise ValueError("its traces are empty: it must be taken with _record_memory_history on")
    busy = sum(bool(trace) for trace in traces)
    several = [f"{busy} devices have traces; this is device {device}, the busiest"] if busy > 1 else []
    stack = _stacks()
    events = [_event(entry, stack) for entry in traces[device]]
    blocks = [
        Block(block["address"], block["requested_size"], stack(block.get("frames", [])))
        for segment in content["segments"]
        for block in segment["blocks"]
        if segment.get("device", 0) == device and block["state"] in _IN_USE
    ]
    return Snapshot(events, blocks, several)


_Stacks = Callable[[list[dict[str, Any]]], tuple[Frame, ...]]


def _stacks() -> _Stacks:
    """A function that converts stacks. Most are in many entries; each is converted once."""
    frame = functools.cache(Frame)
    known: dict[int, tuple[Frame, ...]] = {}

    def stack(frames: list[dict[str, Any]]) -> tuple[Frame, ...]:
        if id(frames) not in known:
            known[id(frames)] = tuple(frame(each["filename"], each["line"], each["name"]) for each in frames)
        return known[id(frames)]

    return stack


def _event(entry: dict[str, Any], stack: _Stacks) -> Event:
    action, time_us = entry["action"], entry["time_us"]
    if action == "oom":
        return Event(action, 0, 0, time_us, ())
    frames = stack(entry.get("frames", [])) if action == "alloc" else ()
    return Event(action, entry["addr"], entry["size"], time_us, frames)
