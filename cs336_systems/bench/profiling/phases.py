"""The file beside a snapshot: the phases of the recorded step, and the tensors at known addresses."""

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
    """allocator: requests to the GPU's allocator. storages: tensors that operators returned, on a CPU."""
    max_entries: int | None = None
    """Capacity of the trace."""
    error: str | None = None
    """Why the step did not finish: it ran out of memory."""
    config: dict[str, Any] = field(default_factory=dict)
    """The workload that ran, and its resolved architecture."""
    env: dict[str, Any] = field(default_factory=dict)
    allocator: dict[str, int] = field(default_factory=dict)
    """The allocator's own peaks over the step, in bytes; empty on a CPU."""

    def save(self, path: Path) -> None:
        """Write the file that `read_phases` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_phases(path: Path) -> Phases:
    """Read a file of `Phases.save`. Raises ValueError naming the file for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"phases file {path} is not JSON: {error}") from error
    try:
        names, times = _list(content["names"], str), _list(content["boundaries_us"], int)
        if not names or len(times) not in (len(names), len(names) + 1) or times != sorted(times):
            raise ValueError(f"boundaries_us has {len(times)} times: it must have {len(names) + 1}, in order")
        held = tuple(Held(**entry) for entry in _list(content["held"], dict))
        for each in held:
            is_known = _is_a(each.address, int) and _is_a(each.name, str) and each.category in CATEGORIES
            if not is_known or not _is_a(each.boundary, int) or not 0 <= each.boundary < len(times):
                raise ValueError(f"held has boundary {each.boundary!r}, category {str(each.category)[:40]!r}")
        kinds = {"max_entries": (int, type(None)), "error": (str, type(None)), "config": dict, "env": dict,
                 "allocator": dict}  # fmt: skip
        rest = {name: content.get(name) for name in kinds}
        wrong = [name for name, kind in kinds.items() if not _is_a(rest[name], kind)]
        if wrong or content["counts"] not in ("allocator", "storages"):
            raise ValueError(f"{(wrong or ['counts'])[0]} is missing or wrong")
        _list(list(content["allocator"].values()), int)
        return Phases(
            names=tuple(map(printable, names)),
            boundaries_us=tuple(times),
            held=held,
            counts=content["counts"],
            **rest,
        )
    except (ValueError, TypeError, KeyError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"phases file {path}: {reason}; without it, categories come from lifetimes") from error


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _list(values: Any, kind: type) -> list[Any]:
    if not isinstance(values, list) or not all(_is_a(value, kind) for value in values):
        raise ValueError(f"{str(values)[:80]!r} must be a list of {kind.__name__}")
    return values
