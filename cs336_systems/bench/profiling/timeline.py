"""Memory in use over time and its peak, as numbers for the picture, the page and the row."""

import functools
import re
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from .history import History
from .snapshot import Frame

PROJECT = ("cs336_basics", "cs336_systems")
_ROW_COLUMNS = 199  # of a row's timeline, of at most 399 moments
_RECORDING = "cs336_systems/bench/profiling/"
_AUTOGRAD = re.compile(r"\b(\w+Backward\d*|AccumulateGrad)::apply\(")


def levels(history: History) -> np.ndarray:
    """Bytes in use by category at each moment (categories x moments)."""
    change = np.zeros((len(history.categories), len(history.times_us) + 1), dtype=np.int64)
    row = {category: i for i, category in enumerate(history.categories)}
    for a in history.allocations:
        change[row[a.category], a.start] += a.size
        change[row[a.category], a.end] -= a.size
    return change[:, :-1].cumsum(axis=1)


@dataclass(frozen=True)
class Timeline:
    """Memory in use at some moments of a recording, the peak among them: enough to draw it."""

    ms: list[float]
    """Times since the start of the step, on the host's clock."""
    in_use: dict[str, list[int]]
    """Bytes at these times, for each category that was ever in use."""
    phases: dict[str, list[float]]
    """Start and end of each phase, in ms."""

    @property
    def total(self) -> np.ndarray:
        """Bytes of all categories together."""
        return np.sum([np.zeros(len(self.ms), dtype=np.int64), *map(np.array, self.in_use.values())], axis=0)


def timeline_of(history: History, columns: int) -> Timeline:
    """The history at its first moment and at two moments per column, the highest and the last: no peak is lost."""
    in_use, ms = levels(history), np.array(history.times_us) / 1e3
    total = in_use.sum(axis=0)
    span = max(float(ms[-1] - ms[0]), 1e-9)
    column = np.minimum(((ms - ms[0]) / span * columns).astype(np.int64), columns - 1)
    ends = np.flatnonzero(np.append(np.diff(column), 1))
    starts = np.append(0, ends[:-1] + 1)
    highest = [start + int(total[start : end + 1].argmax()) for start, end in zip(starts, ends, strict=True)]
    moments = np.unique(np.concatenate(([0], highest, ends)))
    spans = zip(history.phases, history.boundaries, history.boundaries[1:], strict=False)
    return Timeline(
        ms[moments].tolist(),
        {c: sizes[moments].tolist() for c, sizes in zip(history.categories, in_use, strict=True) if sizes.any()},
        {name: [float(ms[a]), float(ms[b])] for name, a, b in spans},
    )  # fmt: skip


def facts(history: History, largest: int = 10) -> dict[str, Any]:
    """The peak, its time and contents; the peak of each phase; the largest allocations, with the code that made them.

    Also a `Timeline`, from which a report draws the picture without the snapshot.
    """
    in_use = levels(history)
    total = in_use.sum(axis=0)
    peak = int(total.argmax())
    spans = zip(history.phases, history.boundaries, history.boundaries[1:], strict=False)
    return {
        "peak_bytes": int(total[peak]),
        "peak_phase": history.phase_at(peak),
        "peak_ms": history.times_us[peak] / 1e3,
        "at_peak_bytes": dict(zip(history.categories, in_use[:, peak].tolist(), strict=True)),
        "phase_peak_bytes": {name: int(total[a : b + 1].max()) for name, a, b in spans},
        "timeline": asdict(timeline_of(history, _ROW_COLUMNS)),
        "allocations": len(history.allocations),
        "allocated_bytes": sum(a.size for a in history.allocations if a.start > 0),
        "largest": [
            {
                "bytes": a.size,
                "phase": "before" if a.start == 0 else history.phase_at(a.start),
                "category": a.category,
                "name": a.name,
                "code": code_lines(a.frames, most=2),
            }
            for a in sorted(history.allocations, key=lambda a: -a.size)[:largest]
        ],
        "warnings": list(history.warnings),
    }


def code_lines(frames: tuple[Frame, ...], most: int = 6) -> list[str]:
    """The code that asked for memory: the innermost lines of this project, or of any Python code outside PyTorch.

    The backward pass on a GPU runs in a thread without Python. There it is the autograd operation, such as
    "autograd: MulBackward0", if the stack has PyTorch's C++ frames. Empty if nothing is known.
    """
    own: list[str] = []
    others: list[str] = []
    operations: list[str] = []
    for frame in frames:
        path = project_path(frame.file)
        if path.startswith(_RECORDING):  # frames further out only call the recording
            break
        if path:
            own.append(f"{path}:{frame.line} {frame.function}")
        elif frame.file.endswith(".py") and not _is_library(frame.file):
            others.append(f"{frame.file}:{frame.line} {frame.function}")
        elif found := _AUTOGRAD.search(frame.function):
            operations.append(f"autograd: {found[1]}")
    return (own or others or operations)[:most]


@functools.lru_cache(maxsize=10_000)  # called once per frame, and files are few
def project_path(file: str) -> str:
    """A file's path from the project's package on; empty for other code."""
    parts = PurePath(file.replace("\\", "/")).parts
    starts = [i for i, part in enumerate(parts) if part in PROJECT]
    return "/".join(parts[starts[-1] :]) if starts and file.endswith(".py") else ""


@functools.lru_cache(maxsize=10_000)
def _is_library(file: str) -> bool:
    parts = PurePath(file.replace("\\", "/")).parts
    return bool({"torch", "site-packages", *PROJECT} & set(parts)) or any(p.startswith("python3") for p in parts[:-1])
