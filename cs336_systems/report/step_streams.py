"""Compute and communication of a GPU over one step: tables, pictures and a page; the view of `overlap-trace`."""

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.case import option_words
from ..bench.cases.ddp import OverlapTrace
from ..bench.instruments.streams import Streams, totals
from ..bench.instruments.trace import merge
from ..bench.profiling.nsys import record_command
from ..bench.profiling.page import fill_page
from ..bench.row import Row
from ..machine.files import write_whole
from ..planner.rows import naming
from .markdown import markdown_table
from .pictures import save_picture
from .selection import common_facts
from .spec import Column, View
from .strategy_tables import SETTING, STREAMS

logger = logging.getLogger(__name__)
COLORS = {"compute": "#1f77b4", "communication": "#d62728"}
_KEYS = (*SETTING, "variant")


def read_streams(path: Path) -> Streams:
    """The intervals that `record_step` wrote. Raises ValueError or FileNotFoundError naming the file."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"{path} {found}: a file that cs336 bench ddp --traces has written is needed")
    try:
        content = json.loads(path.read_text())
        return {kind: [(float(a), float(b)) for a, b in content[kind]] for kind in COLORS}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold the intervals of a step: {error!r}") from error


def streams_table(paths: Sequence[Path]) -> str:
    """A line for each step: its length, the times of compute and communication, and how much of them overlaps."""
    lines = []
    for path in paths:
        *times, hidden = totals(read_streams(path)).values()
        lines.append((path.stem, *(f"{time:.1f}" for time in times), "n/a" if hidden is None else f"{hidden:.0%}"))
    header = "step of,from first to last kernel (ms),computing (ms),communicating (ms),both (ms),hidden"
    return markdown_table(header.split(","), lines)


def plot_streams(paths: Sequence[Path], out: Path) -> None:
    """Draw the streams of some steps into a PNG."""
    save_picture(streams_figure([(path.stem, path) for path in paths]), out)


def streams_figure(steps: Sequence[tuple[str, Path]]) -> Any:
    """The streams of some named steps one below the other, on one time axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 1.3 * len(steps)), layout="constrained")
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, path) in zip(axes, steps, strict=True):
        streams = read_streams(path)
        for row, (kind, color) in enumerate(COLORS.items()):
            # Kernels a few microseconds apart are drawn as one: a pixel is a quarter of a millisecond.
            spans = [(a, b - a) for a, b in merge(streams[kind], gap=0.02)]
            axis.broken_barh(spans, (-row - 0.4, 0.8), color=color, linewidth=0)
        axis.set_yticks([-row for row in range(len(COLORS))], list(COLORS))
        axis.set_title(name, loc="left", fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlabel("ms from the first kernel of the step")
    axes[-1].set_xlim(left=0)
    return figure


def write_page(paths: Sequence[Path], out: Path, note: str) -> None:
    """Write a page of some steps that can be zoomed, from files that `record_step` wrote with the kernels' names."""
    steps = []
    for path in paths:
        streams, content = read_streams(path), json.loads(path.read_text())
        with naming(str(path)):
            named = {"names": content["names"], "pieces": content["pieces"]}
        steps.append({"name": path.stem, "totals": totals(streams), **named})
    data = {"kinds": [{"name": name, "color": color} for name, color in COLORS.items()], "steps": steps}
    title = "Compute and communication over one step"
    write_whole(out, fill_page("streams.html", ("streams.js",), title, note, data))


def streams_file(metrics: Mapping[str, Any], folder: Path) -> Path | None:
    """The file of intervals of a row's step, where it was written or else below the folder of the rows."""
    if not metrics.get("streams"):
        return None
    written = Path(metrics["streams"])
    for file in (written, folder / written.parent.name / written.name):
        if file.is_file():
            return file
    logger.warning("%s is not here, left out of the picture", written)
    return None


def draw_streams(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the picture and the page of the rows' steps into a folder. Steps whose file is gone are left out."""
    found = {file: row for row in rows if (file := streams_file(row.metrics, folder)) is not None}
    if not found:
        return []
    files = [folder / "overlap-trace.png", folder / "overlap-trace.html"]
    plot_streams(list(found), files[0])
    write_page(list(found), files[1], common_facts(list(found.values()), _KEYS)[0])
    return files


def nsys_command(row: Row) -> str:
    """The shell command that records the same step with Nsight Systems."""
    names = ("variant", "devices", "size", "context_length", "batch_size", "precision", "compile", "warmup")
    changed = {n: row.config[n] for n in names if n == "variant" or row.config[n] != getattr(OverlapTrace, n)}
    stem = Path(row.config["traces"]).with_name(f"nsys-{Path(row.metrics.get('streams') or 'step').stem}")
    options = [*option_words(changed), "--out", str(stem.parent / "nsys")]
    command = ["cs336", "bench", "overlap-trace", "--profiler", "nsys", *options]
    return shlex.join([*record_command(stem), *command])


VIEW = View(
    keys=_KEYS,
    columns=(Column("step (ms)", "step_ms.p50"), *STREAMS),
    details=lambda row: (
        f"To record the step of {row.variant} with Nsight Systems instead:\n\n```bash\n{nsys_command(row)}\n```"
    ),
    more=draw_streams,
)
"""The view of `overlap-trace`."""
