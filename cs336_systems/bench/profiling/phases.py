"""The file beside a snapshot: the phases of the recorded step, and the tensors at known addresses."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...planner.rows import naming

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
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_phases(path: Path) -> Phases:
    """Read a file of `Phases.save`. Raises ValueError naming one that is not."""
    with naming(str(path)):
        content = json.loads(path.read_bytes())
        names, times = content.pop("names"), content.pop("boundaries_us")
        held = tuple(Held(**entry) for entry in content.pop("held"))
        return Phases(names=tuple(names), boundaries_us=tuple(times), held=held, **content)
