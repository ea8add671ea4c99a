"""The picture of a memory history: what was in use over time, stacked by category, with the phases and the peak."""

from pathlib import Path
from typing import Any

import numpy as np

from .history import LIFETIMES, History
from .phases import ACTIVATIONS, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARIES
from .timeline import Levels, levels
from .wording import size_text

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
    """Draw the history into a PNG. Of moments that share a column of pixels, the highest is drawn: no peak is lost."""
    from matplotlib.figure import Figure

    active = levels(history)
    unit, size = ("GiB", 2**30) if active.total.max() >= 2**30 else ("MiB", 2**20)
    shown = [i for i in range(len(history.categories)) if active.by_category[i].any()]
    time_ms = np.array(history.times_us) / 1e3
    columns = _column_peaks(time_ms, active.total)
    figure = Figure(figsize=(12, 6), layout="constrained")
    axes = figure.subplots()
    bottom = np.zeros(len(columns))
    for i in shown:
        top = bottom + active.by_category[i, columns] / size
        name = history.categories[i]
        label = f"{name}: {size_text(active.by_category[i, active.peak])}"
        axes.fill_between(time_ms[columns], bottom, top, step="post", color=COLORS[name], linewidth=0, label=label)
        bottom = top
    axes.step(time_ms[columns], bottom, where="post", color="#333333", linewidth=0.7)
    axes.set_ylim(0, active.total.max() / size * 1.16 or 1)
    axes.set_xlim(time_ms[0], max(time_ms[-1], time_ms[0] + 1e-3))
    _mark_phases(axes, history, time_ms)
    _mark_peak(axes, active, time_ms, size)
    axes.set_xlabel("time on the host (ms)")
    axes.set_ylabel(f"memory in use ({unit})")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, title="at the peak")
    figure.savefig(path, dpi=150)


def _column_peaks(times: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Of the moments in each column, the highest and the last, in order."""
    span = max(float(times[-1] - times[0]), 1e-9)
    column = np.minimum(((times - times[0]) / span * _COLUMNS).astype(np.int64), _COLUMNS - 1)
    ends = np.flatnonzero(np.append(np.diff(column), 1))
    starts = np.append(0, ends[:-1] + 1)
    highest = [start + int(total[start : end + 1].argmax()) for start, end in zip(starts, ends, strict=True)]
    return np.unique(np.concatenate((highest, ends)))


def _mark_phases(axes: Any, history: History, time_ms: np.ndarray) -> None:
    span = time_ms[-1] - time_ms[0]
    for k, name in enumerate(history.phases):
        start, end = (time_ms[history.boundaries[k + i]] for i in (0, 1))
        if k % 2:
            axes.axvspan(start, end, color="#000000", alpha=0.04, linewidth=0, zorder=0)
        axes.axvline(start, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
        is_narrow = end - start < 0.1 * span  # its name ends where it ends, and covers the lines that it crosses
        label = dict(ha="right", backgroundcolor="#ffffffcc") if is_narrow and k else dict(ha="left")
        at = end if is_narrow and k else start
        axes.text(at, 0.985, f" {name} ", transform=axes.get_xaxis_transform(), va="top", color="#333333", **label)
    axes.axvline(time_ms[history.boundaries[-1]], color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))


def _mark_peak(axes: Any, active: Levels, time_ms: np.ndarray, size: int) -> None:
    peak = active.peak
    at, height = time_ms[peak], active.total[peak] / size
    late = at > (time_ms[0] + time_ms[-1]) / 2
    axes.plot([at], [height], marker="v", color="#b00020", markersize=7, clip_on=False)
    axes.annotate(
        f"peak {size_text(active.total[peak])} at {at:.1f} ms",
        (at, height),
        xytext=(-8 if late else 8, 7),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=10,
        color="#b00020",
        fontweight="bold",
    )
