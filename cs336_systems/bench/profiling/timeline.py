"""Memory in use over time and its peak: numbers for the row and the page, and the picture with its texts."""

import functools
import re
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from ...machine.files import write_figure
from ..row import Row
from .history import LIFETIMES, History
from .phases import ACTIVATIONS, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARIES
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


COLORS = {
    PARAMETERS: "#4c78a8",
    OPTIMIZER: "#9ecae9",
    GRADIENTS: "#e45756",
    ACTIVATIONS: "#54a24b",
    TEMPORARIES: "#f2a93b",
    OTHER: "#a0a0a0",
    **dict(zip(LIFETIMES, ("#4c78a8", "#9ecae9", "#54a24b", "#f2a93b"), strict=True)),
}
_COLUMNS = 1600


def plot_timeline(history: History, path: Path, title: str) -> None:
    """Draw the history into a PNG. Where moments share a column of pixels, the highest is drawn: no peak is lost."""
    write_figure(timeline_figure(timeline_of(history, _COLUMNS), title), path)


def timeline_figure(timeline: Timeline, title: str) -> Any:
    """The picture of a timeline."""
    from matplotlib.figure import Figure

    total, time_ms = timeline.total, np.array(timeline.ms)
    peak = int(total.argmax())
    unit, size = ("GiB", 2**30) if total[peak] >= 2**30 else ("MiB", 2**20)
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots()
    areas = fill_memory(axes, timeline, size)
    axes.step(time_ms, total / size, where="post", color="#333333", linewidth=0.7)
    axes.set_ylim(0, total[peak] / size * 1.16 or 1)
    mark_phases(axes, timeline)
    _mark_peak(axes, time_ms, time_ms[peak], total[peak], size)
    axes.set_xlabel("time on the host (ms)")
    axes.set_ylabel(f"memory in use ({unit})")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    labels = [f"{name}: {size_text(timeline.in_use[name][peak])}" for name in areas]
    handles = [*areas.values()][::-1]
    figure.legend(handles, labels[::-1], loc="outside right upper", frameon=False, title="at the peak")
    return figure


def fill_memory(axes: Any, timeline: Timeline, size: int) -> dict[str, Any]:
    """Fill an area for each category, in units of `size` bytes, one above the other; return the areas."""
    areas, bottom = {}, np.zeros(len(timeline.ms))
    for name, in_use in timeline.in_use.items():
        top = bottom + np.array(in_use) / size
        areas[name] = axes.fill_between(timeline.ms, bottom, top, step="post", color=COLORS[name], linewidth=0)
        bottom = top
    axes.set_xlim(timeline.ms[0], max(timeline.ms[-1], timeline.ms[0] + 1e-3))
    return areas


def mark_phases(axes: Any, timeline: Timeline) -> None:
    """Name the phases of a step, with a line where each begins."""
    span, last = timeline.ms[-1] - timeline.ms[0], timeline.ms[-1]
    for k, (name, (start, end)) in enumerate(timeline.phases.items()):
        if k % 2:
            axes.axvspan(start, end, color="#000000", alpha=0.04, linewidth=0, zorder=0)
        axes.axvline(start, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        is_narrow = end - start < 0.1 * span  # its name ends where the phase ends, and covers the lines that it crosses
        label = dict(ha="right", backgroundcolor="#ffffffcc") if is_narrow and k else dict(ha="left")
        at = end if is_narrow and k else start
        axes.text(at, 0.985, f" {name} ", transform=axes.get_xaxis_transform(), va="top", color="black", **label)
        last = end
    axes.axvline(last, color="black", linewidth=0.8, linestyle=(0, (4, 3)))


def _mark_peak(axes: Any, time_ms: np.ndarray, at: float, num_bytes: float, size: int) -> None:
    height = num_bytes / size
    late = at > (time_ms[0] + time_ms[-1]) / 2
    axes.plot([at], [height], marker="v", color="#b00020", markersize=7, clip_on=False)
    axes.annotate(
        f"peak {size_text(num_bytes)} at {at:.1f} ms",
        (at, height),
        xytext=(-8 if late else 8, 7),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=10,
        color="#b00020",
        fontweight="bold",
    )


def size_text(num_bytes: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(num_bytes) >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def title_of(row: Row) -> str:
    """A heading that names the snapshot or the workload of a row."""
    config = row.config
    if "snapshot" in config:
        return f"Memory of {config['snapshot']}"
    words = [f"{config.get('size')}, {config.get('batch_size')} x {config.get('context_length')} tokens"]
    words += [str(config.get(name)) for name in ("mode", "precision", "attention")]
    words += ["compiled"] * bool(config.get("compile"))
    if config.get("activation_checkpointing", "none") != "none":
        words.append(f"checkpointed by {config['activation_checkpointing']}")
    return f"Memory of {', '.join(words)}"


def note_of(row: Row) -> str:
    """A note on the way of counting and of finding categories."""
    counts = {
        "allocator": "Counted: requests to the GPU's allocator, without its rounding. Times are the host's, which "
        "requests memory before the GPU uses it.",
        "storages": "Counted: the storages of tensors that operators returned, on a CPU, without temporaries inside an "
        "operator.",
        "unknown": "Counted: the requested sizes in the snapshot.",
    }
    categories = {
        "tensors": "Parameters, optimizer state and gradients are known by their addresses; activations are allocated "
        "by the forward pass and alive when the backward pass begins; other was there before.",
        "lifetimes": "There is no phases.json beside this snapshot, so categories are lifetimes within the recording.",
    }
    return f"{counts[row.metrics['counts']]} {categories[row.metrics['categories_from']]}"
