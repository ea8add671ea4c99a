"""Memory snapshots as `torch.cuda.memory._dump_snapshot` writes them, read into plain, checked data.

A snapshot has `segments`, the allocator's memory at the end, and for each device a trace of its actions before.
"""

import io
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

_MOST_FILE_BYTES = 2**30
_MOST_ENTRIES = 5_000_000
_MOST_FRAMES = 256
_STATES = ("active_allocated", "active_awaiting_free", "active_pending_free")


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
    stream: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Memory in use when the snapshot was taken; `size` is the requested size in bytes."""

    address: int
    size: int
    stream: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The actions of one device's allocator, in order, and the blocks in use at the end."""

    events: list[Event]
    blocks: list[Block]
    warnings: list[str] = field(default_factory=list)


class _WrongError(ValueError):
    """A fault inside a snapshot."""


class _PlainUnpickler(pickle._Unpickler):
    """Refuses every import. Without one a pickle has nothing to call, so nothing in the file is executed.

    It builds on the implementation in Python, because the one in C allocates as much as an index in the file says.
    """

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _WrongError(f"it asks for {printable(f'{module}.{name}'[:200])}, but may hold plain data only")


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot of one device: the busiest, if there are several.

    Raises FileNotFoundError, or ValueError naming the file, if it is not a snapshot. Nothing in the file is executed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"snapshot {path} does not exist, or is no file")
    if (size := path.stat().st_size) > _MOST_FILE_BYTES:
        raise ValueError(f"snapshot {path} has {size:,} bytes: it must be at most {_MOST_FILE_BYTES:,}")
    try:
        return _Reader().snapshot(_PlainUnpickler(io.BytesIO(path.read_bytes())).load())
    except _WrongError as error:
        raise ValueError(f"snapshot {path}: {error}") from error
    except Exception as error:  # a damaged pickle can raise any
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"snapshot {path} is no pickle of plain data, or was cut short ({reason})") from error


class _Reader:
    """Checks and converts; stacks that are shared in the file are converted once."""

    def __init__(self) -> None:
        self.entries = 0
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._frames: dict[int, Frame] = {}

    def snapshot(self, content: Any) -> Snapshot:
        if type(content) is not dict:
            raise _WrongError(f"it holds {_shown(content)}, not a dict with segments and device_traces")
        segments = self._counted(_get(content, "segments", list, "the snapshot"))
        traces = self._counted(_get(content, "device_traces", list, "the snapshot"))
        for i, trace in enumerate(traces):
            if type(trace) is not list:
                raise _WrongError(f"device_traces[{i}] is {_shown(trace)}: it must be a list")
        busy = [i for i, trace in enumerate(traces) if trace]
        if not busy:
            raise _WrongError("its traces are empty: it must be taken with _record_memory_history on")
        device = max(busy, key=lambda i: len(traces[i]))
        warnings = []
        if len(busy) > 1:
            warnings.append(f"{len(busy)} devices have traces; this is device {device}, the busiest")
        events = [self._event(entry) for entry in self._counted(traces[device])]
        on_device = [s for s in segments if _number(s, "device", "a segment", 0) == device]
        blocks = [block for segment in on_device for block in self._active_blocks(segment)]
        return Snapshot(events, blocks, warnings)

    def _counted(self, entries: list[Any]) -> list[Any]:
        """The entries, unless they are too many: a small file can hold the same list a million times."""
        self.entries += len(entries)
        if self.entries > _MOST_ENTRIES:
            raise _WrongError(f"it has more than {_MOST_ENTRIES:,} entries")
        return entries

    def _event(self, entry: Any) -> Event:
        where = "a trace entry"
        action, time_us = _get(entry, "action", str, where), _number(entry, "time_us", where)
        if action == "oom":
            return Event(action, 0, 0, time_us, 0, ())
        frames = self._stack(entry.get("frames", [])) if action == "alloc" else ()
        address, size = (_number(entry, name, where) for name in ("addr", "size"))
        return Event(action[:40], address, size, time_us, _number(entry, "stream", where, 0), frames)

    def _active_blocks(self, segment: Any) -> Iterable[Block]:
        """The blocks in use. In older snapshots blocks have no addresses; they follow one another in memory."""
        address = _number(segment, "address", "a segment")
        stream = _number(segment, "stream", "a segment", 0)
        for block in self._counted(_get(segment, "blocks", list, "a segment")):
            size = _number(block, "size", "a block")
            address = _number(block, "address", "a block", address)
            if _get(block, "state", str, "a block") in _STATES:
                requested = _number(block, "requested_size", "a block", size)
                yield Block(address, requested, stream, self._stack(block.get("frames", [])))
            address += size

    def _stack(self, frames: Any) -> tuple[Frame, ...]:
        if type(frames) is not list:
            raise _WrongError(f"frames is {_shown(frames)}: it must be a list")
        if id(frames) not in self._stacks:
            self._stacks[id(frames)] = tuple(self._frame(frame) for frame in frames[:_MOST_FRAMES])
        return self._stacks[id(frames)]

    def _frame(self, frame: Any) -> Frame:
        if id(frame) not in self._frames:
            file, name = (printable(_get(frame, key, str, "a frame")[:500]) for key in ("filename", "name"))
            line = _get(frame, "line", int, "a frame")
            self._frames[id(frame)] = Frame(file, line if 0 <= line < 1 << 40 else 0, name)
        return self._frames[id(frame)]


def _get(content: Any, name: str, kind: type, where: str, default: Any = None) -> Any:
    """An entry of a dict, of the exact type; the default, if there is one, for a missing entry."""
    if type(content) is not dict:
        raise _WrongError(f"{where} is {_shown(content)}: it must be a dict")
    if name not in content:
        if default is None:
            raise _WrongError(f"{where} has no {name}")
        return default
    value = content[name]
    if type(value) is not kind:
        raise _WrongError(f"{name} of {where} is {_shown(value)}: it must be a {kind.__name__}")
    return value


def _number(content: Any, name: str, where: str, default: int | None = None) -> int:
    value: int = _get(content, name, int, where, default)
    bits = 48 if name in ("size", "requested_size") else 64  # sums of sizes fit into 64 bits
    if not 0 <= value < 1 << bits:
        raise _WrongError(f"{name} of {where} is {_shown(value)}: it must be at least 0 and below 2^{bits}")
    return value


def printable(text: str) -> str:
    """The text, with replacements for characters that a terminal, a table or a font may not show."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _shown(value: Any) -> str:
    """A value in few characters; a container by its type, because it may be nested without end."""
    if type(value) is int:
        return str(value) if abs(value) < 1 << 80 else "an integer of many digits"
    if type(value) is str:
        return repr(value[:40])
    return repr(value) if isinstance(value, float | bool | None) else f"a {type(value).__name__}"
