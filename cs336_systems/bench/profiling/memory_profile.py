"""The profile `memory`: the memory of a step over time, from the recording to the row `profile-memory`."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from cs336_basics.shape import ModelShape

from ...config.checks import folder_to_write
from ...config.model import SHAPE_FIELDS
from ...planner.accounting import num_parameters, residual_bytes
from ..outcome import failure
from ..row import Row, append_row, check_row_file
from ..workload import Workload
from .captions import note_of, title_of
from .history import history_of
from .page import write_page
from .phases import PHASES_FILE, SNAPSHOT_FILE, Phases, read_phases
from .recording import record
from .snapshot import read_snapshot
from .timeline import facts
from .timeline_plot import plot_timeline

logger = logging.getLogger(__name__)
CASE = "profile-memory"
ROWS_FILE, PICTURE_FILE, PAGE_FILE, SUMMARY_FILE = "rows.jsonl", "timeline.png", "timeline.html", "summary.md"
QUICK = dict(size="quick", context_length=64, batch_size=2)


def profile(
    config: Workload,
    folder: Path,
    rows: Path | None = None,
    *,
    warmup: int = 2,
    detail: int = 5000,
    min_bytes: int = 0,
) -> Row:
    """Record a step of a workload into a folder and draw it there; return its row, also appended to a file of rows.

    rows: that file (default: the folder's own). A model that does not fit even without a step gives a row with status
    oom and no picture.
    """
    rows = rows or folder / ROWS_FILE
    check_out(rows)
    for name in (SNAPSHOT_FILE, PHASES_FILE, PICTURE_FILE, PAGE_FILE, SUMMARY_FILE):
        (folder / name).unlink(missing_ok=True)  # of an earlier run, which this one may fail to replace
    logger.info("recording: %s of size %s", config.mode, config.size)
    try:
        record(config, warmup, folder)
    except Exception as error:
        status, reason = failure(error)
        if status != "oom":
            raise
        row = Row(case=CASE, variant=config.mode, config=dataclasses.asdict(config), status=status, error=reason)
        append_row(rows, row)
        return row
    return draw(folder / SNAPSHOT_FILE, folder, rows, detail=detail, min_bytes=min_bytes)


def draw(snapshot: Path, folder: Path, rows: Path | None = None, *, detail: int = 5000, min_bytes: int = 0) -> Row:
    """Draw a snapshot into a folder, and append its row to a file of rows (default: the folder's own).

    Phases are read from `phases.json` beside a `snapshot.pickle`. Without them, categories come from lifetimes alone.
    The page at first draws the `detail` largest allocations of at least `min_bytes` one by one. Raises
    FileNotFoundError, or ValueError naming the file, if it is not a snapshot.
    """
    beside = snapshot.parent / PHASES_FILE
    phases = read_phases(beside) if snapshot.name == SNAPSHOT_FILE and beside.exists() else None
    history = history_of(read_snapshot(snapshot), phases)
    row = _row(snapshot, phases, facts(history))
    rows = rows or folder / ROWS_FILE
    check_out(rows)
    plot_timeline(history, folder / PICTURE_FILE, title_of(row))
    write_page(history, folder / PAGE_FILE, title_of(row), note_of(row), detail, min_bytes)
    append_row(rows, row)
    return row


def check_out(rows: Path) -> None:
    """Raise ValueError if the rows, and so everything beside them, cannot be written."""
    folder_to_write(str(rows.parent))
    check_row_file(rows)


def _row(snapshot: Path, phases: Phases | None, found: dict[str, Any]) -> Row:
    if phases is None:
        metrics = {**found, "categories_from": "lifetimes", "counts": "unknown", "allocator": {}, "counted": {}}
        return Row(case=CASE, variant=snapshot.name, config={"snapshot": snapshot.name}, metrics=metrics, env={})
    metrics = {**found, "categories_from": "tensors", "counts": phases.counts, "allocator": phases.allocator}
    return Row(
        case=CASE,
        variant=str(phases.config.get("mode", "step")),
        config=phases.config,
        status="ok" if phases.error is None else "oom",
        metrics={**metrics, "counted": counted(phases.config)},
        env=phases.env,
        error=phases.error,
    )


def counted(config: dict[str, Any]) -> dict[str, int]:
    """Bytes counted from a workload's shapes: one residual-stream activation, and the parameters; both float32.

    batch x context x d_model x 4, and 4 per parameter. Empty if the configuration lacks one of these.
    """
    names = (*SHAPE_FIELDS, "batch_size")
    sizes = {name: value for name in names if type(value := config.get(name)) is int}
    if len(sizes) < len(names):
        return {}
    batch_size = sizes.pop("batch_size")
    shape = ModelShape(**sizes)
    return {
        "residual_stream_bytes": residual_bytes(shape, batch_size, shape.context_length),
        "parameter_bytes": 4 * num_parameters(shape),
    }
