"""What a snapshot does not say, in a file beside it: the phases of the step, and whose tensors the addresses were."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .snapshot import printable

SNAPSHOT_FILE, PHASES_FILE = "snapshot.pickle", "phases.json"
PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
ACTIVATIONS, TEMPORARIES, OTHER = "activations", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS, TEMPORARIES, OTHER)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A tensor whose memory starts at `address` at a boundary; boundary 0 is the start of the recording."""

    boundary: int
    address: int
    category: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The phases of a recorded step and the tensors that were alive between them.

    Phase k lies between boundaries k and k + 1; the last phase has no end if it failed.
    """

    names: tuple[str, ...]
    boundaries_us: tuple[int, ...]
    """Time of each boundary, in us since 1970. The trace has a marker at each, which is exact."""
    held: tuple[Held, ...] = ()
    counts: Literal["allocator", "storages"] = "allocator"
    """allocator: what the GPU's allocator was asked for. storages: of tensors that operators returned, on a CPU."""
    max_entries: int | None = None
    """Entries that the trace had room for."""
    error: str | None = None
    """Why the step did not finish: it ran out of memory."""
    config: dict[str, Any] = field(default_factory=dict)
    """The workload that ran, and its resolved architecture."""
    env: dict[str, Any] = field(default_factory=dict)
    allocator: dict[str, int] = field(default_factory=dict)
    """What the allocator itself counted over the step, in bytes; empty on a CPU."""

    def save(self, path: Path) -> None:
        """Write the file that `read_phases` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_phases(path: Path) -> Phases:
    """Read what `Phases.save` wrote. Raises ValueError naming the file for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"phases file {path} is not JSON: {error}") from error
    try:
        return _phases(content)
    except _WrongError as error:
        raise ValueError(f"phases file {path}: {error}; without it, categories come from lifetimes") from error


class _WrongError(ValueError):
    """What is wrong with the content."""


def _phases(content: Any) -> Phases:
    _check(content, dict, "it")
    names, times = _list(content, "names", str), _list(content, "boundaries_us", int)
    if not names or len(times) not in (len(names), len(names) + 1) or times != sorted(times):
        raise _WrongError(f"boundaries_us has {len(times)} times: it must have {len(names) + 1}, in order")
    held = tuple(_held(entry, len(times)) for entry in _list(content, "held", dict))
    if content.get("counts") not in ("allocator", "storages"):
        raise _WrongError("counts must be allocator or storages")
    optional: dict[str, tuple[type, ...]] = {"max_entries": (int, type(None)), "error": (str, type(None))}
    optional |= dict.fromkeys(("config", "env", "allocator"), (dict,))
    for name, kinds in optional.items():
        if not isinstance(content.get(name), kinds):
            raise _WrongError(f"{name} is missing or a {type(content.get(name)).__name__}")
    for name, value in content["allocator"].items():
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise _WrongError(f"allocator.{name[:40]} must be an integer from 0 to 2^63 - 1")
    names = [printable(name) for name in names]
    rest = {name: content.get(name) for name in ("counts", *optional)}
    return Phases(names=tuple(names), boundaries_us=tuple(times), held=held, **rest)


def _held(entry: dict[str, Any], num_boundaries: int) -> Held:
    try:
        held = Held(**entry)
    except TypeError as error:
        raise _WrongError("an entry of held must have boundary, address, category and name") from error
    for name, kind in (("boundary", int), ("address", int), ("category", str), ("name", str)):
        _check(getattr(held, name), kind, f"{name} of an entry of held")
    if not 0 <= held.boundary < num_boundaries or held.category not in CATEGORIES:
        raise _WrongError(f"held has boundary {held.boundary}, category {held.category[:40]!r}")
    return held


def _list(content: dict[str, Any], name: str, kind: type) -> list[Any]:
    _check(content.get(name), list, name)
    for entry in content[name]:
        _check(entry, kind, f"an entry of {name}")
    return content[name]


def _check(value: Any, kind: type, name: str) -> None:
    if type(value) is not kind:
        raise _WrongError(f"{name} is missing or a {type(value).__name__}: it must be a {kind.__name__}")
