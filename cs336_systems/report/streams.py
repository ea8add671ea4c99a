"""What the streams of a GPU did in one step: how long they computed, communicated and did both; in numbers, drawn."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from ..bench.instruments.intervals import merge
from ..bench.instruments.streams import Streams, totals
from .pictures import save_picture
from .tables import markdown_table

COLORS = {"compute": "#1f77b4", "communication": "#d62728"}


def read_streams(path: Path) -> Streams:
    """The intervals that `record_step` has written. Raises ValueError or FileNotFoundError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: a file that cs336 bench ddp --traces has written is needed")
    try:
        content = json.loads(path.read_text())
        streams = {kind: [(float(a), float(b)) for a, b in content[kind]] for kind in COLORS}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} does not hold the intervals of a step: {error}") from error
    for kind, intervals in streams.items():
        for begin, end in intervals:
            if not -math.inf < begin <= end < math.inf:
                raise ValueError(f"{path}: {kind} has the interval ({begin}, {end}): it must not end before it begins")
    return streams


def streams_table(paths: Sequence[Path]) -> str:
    """A line per step: its length, how long the GPU computed and communicated, and how much of that was at once."""
    lines = []
    for path in paths:
        *times, hidden = totals(read_streams(path)).values()
        lines.append((path.stem, *(f"{time:.1f}" for time in times), "n/a" if hidden is None else f"{hidden:.0%}"))
    header = "step of,from first to last kernel (ms),computing (ms),communicating (ms),both (ms),hidden"
    return markdown_table(header.split(","), lines)


def plot_streams(paths: Sequence[Path], out: Path) -> None:
    """Draw the streams of some steps one below the other, on one scale, into a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 1.3 * len(paths)), layout="constrained")
    axes = figure.subplots(len(paths), 1, sharex=True, squeeze=False)[:, 0]
    for axis, path in zip(axes, paths, strict=True):
        streams = read_streams(path)
        for row, (kind, color) in enumerate(COLORS.items()):
            # Kernels a few microseconds apart are drawn as one: a pixel is a quarter of a millisecond.
            spans = [(a, b - a) for a, b in merge(streams[kind], gap=0.02)]
            axis.broken_barh(spans, (-row - 0.4, 0.8), color=color, linewidth=0)
        axis.set_yticks([-row for row in range(len(COLORS))], list(COLORS))
        axis.set_title(path.stem, loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("ms from the first kernel of the step")
    axes[-1].set_xlim(left=0)
    save_picture(figure, out)
