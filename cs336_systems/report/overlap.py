"""What is shown of the case `overlap-trace`: the streams of the strategies' steps, drawn one above the other."""

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.cases.overlap_trace import DEFAULTS
from ..bench.instruments.streams import totals
from ..bench.profiling.nsys import record_command
from ..bench.profiling.page import fill_page
from ..bench.row import Row
from ..machine.files import write_whole
from .streams import COLORS, plot_streams, read_streams
from .view import Column, View, common_facts

logger = logging.getLogger(__name__)
_KEYS = ("size", "devices", "context_length", "batch_size", "precision", "compile", "variant")
_ASKED = ("variant", "devices", "size", "context_length", "batch_size", "precision", "compile", "warmup")


def nsys_command(row: Row) -> str:
    """The shell command that records the same step with Nsight Systems."""
    words = []
    for name in _ASKED:
        value = row.config[name]
        if name == "variant" or value != DEFAULTS[name]:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    stem = Path(row.config["traces"]).with_name(f"nsys-{Path(row.metrics.get('streams') or 'step').stem}")
    command = ["cs336", "bench", "overlap-trace", "--profiler", "nsys", *words, "--out", str(stem.parent / "nsys")]
    return shlex.join([*record_command(stem), *command])


def streams_file(row: Row, folder: Path) -> Path | None:
    """The file of what ran when in a row's step: where it was written, else in the folder of the rows."""
    if not row.metrics.get("streams"):
        return None
    written = Path(row.metrics["streams"])
    for file in (written, folder / written.parent.name / written.name):
        if file.is_file():
            return file
    logger.warning("%s is not here, left out of the picture", written)
    return None


def draw_streams(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the picture and the page of the rows' steps into a folder; steps without a file here are left out."""
    found = {file: row for row in rows if (file := streams_file(row, folder)) is not None}
    if not found:
        return []
    files = [folder / "overlap-trace.png", folder / "overlap-trace.html"]
    plot_streams(list(found), files[0])
    write_page(list(found), files[1], common_facts(list(found.values()), _KEYS)[0])
    return files


def write_page(paths: Sequence[Path], out: Path, note: str) -> None:
    """Write the page of some steps, to zoom into and to point at, from files that `record_step` wrote with names.

    Raises ValueError or FileNotFoundError naming a file that is not one.
    """
    steps = [_step(path) for path in paths]
    data = {"kinds": [{"name": name, "color": color} for name, color in COLORS.items()], "steps": steps}
    title = "Compute and communication over one step"
    write_whole(out, fill_page("streams.html", ("axes.js", "streams.js"), title, note, data))


def _step(path: Path) -> dict[str, Any]:
    streams, content = read_streams(path), json.loads(path.read_text())
    try:
        names = [str(name) for name in content["names"]]
        pieces = {kind: [(int(i), float(a), float(b)) for i, a, b in content["pieces"][kind]] for kind in COLORS}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold the work of a step piece by piece: {error!r}") from error
    return {"name": path.stem, "totals": totals(streams), "names": names, "pieces": pieces}


def _details(row: Row) -> str:
    return f"To record the step of {row.variant} with Nsight Systems instead:\n\n```bash\n{nsys_command(row)}\n```"


VIEW = View(
    keys=_KEYS,
    columns=(
        Column("step (ms)", "step_ms.p50"),
        Column("profiled: first to last (ms)", "span_ms"),
        Column("computing (ms)", "compute_ms"),
        Column("communicating (ms)", "communication_ms"),
        Column("both (ms)", "both_ms"),
        Column("overlapped", "overlapped", ".0%"),
    ),
    details=_details,
    more=draw_streams,
)
