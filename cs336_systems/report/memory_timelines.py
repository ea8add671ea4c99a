"""Rows of the case `profile-memory` as pictures, and as CSV: what was in use over a step, by category."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..bench.profiling.captions import title_of
from ..bench.profiling.timeline import Timeline
from ..bench.profiling.timeline_plot import timeline_figure
from ..bench.row import Row
from .memory_tables import KEYS, SHOWN
from .pictures import save_picture
from .view import MACHINE, Column, View, differ, label

_TIMELINE = "timeline"


def draw_timeline(row: Row, path: Path) -> Path:
    """Draw a row's timeline into a PNG; return the path. Raises ValueError for an invalid timeline."""
    return save_picture(timeline_figure(Timeline(**row.metrics[_TIMELINE]), title_of(row)), path)


def draw_timelines(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the timeline of each row into a folder; return the files. Older rows, which had none, are left out.

    If there are several pictures, they are named by the fields in which their rows differ.
    """
    drawn = [row for row in rows if _TIMELINE in row.metrics]
    differing = [name for name in (*KEYS, "mode", MACHINE) if differ(drawn, name)]
    files = []
    for row in drawn:
        ends = [label(name, row) for name in differing]
        name = re.sub(r"[^\w.]+", "-", "-".join([row.case, _TIMELINE, *ends]))
        files.append(draw_timeline(row, folder / f"{name}.png"))
    return files


VIEW = View(
    keys=KEYS,
    columns=(
        Column("peak (GiB)", "peak_bytes", ".3f", 2**30),
        Column("in", "peak_phase", "s"),
        *(Column(f"{name} (GiB)", f"at_peak_bytes.{name}", ".3f", 2**30) for name in SHOWN),
    ),
    more=draw_timelines,
)
