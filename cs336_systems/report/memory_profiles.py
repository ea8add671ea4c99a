"""Rows of `profile-memory`: many in one table, one in full, and their timelines as pictures."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..bench.profiling.timeline import Timeline
from ..bench.profiling.timeline_plot import note_of, size_text, timeline_figure, title_of
from ..bench.row import Row
from .fields import number
from .markdown import markdown_table
from .pictures import save_picture
from .selection import MACHINE, OUTCOMES, differ, grouped, label, latest, machine
from .spec import Column, View

KEYS = ("snapshot", "size", "vocab_size", "batch_size", "context_length", "compile", "activation_checkpointing",
         "attention", "precision", "optimizer")  # fmt: skip
_CATEGORIES = ("parameters", "optimizer state", "gradients", "activations", "temporaries", "other")


def memory_table(rows: Sequence[Row]) -> str:
    """A line for each row: the peak, its phase and its parts, in GiB. Raises ValueError for a row without these."""
    header = ["size", "step", "attention", "precision", "peak (GiB)", "in", *_CATEGORIES]
    tables = []
    for group in grouped(rows, ()):
        table = markdown_table(header, map(_table_line, latest(group, KEYS)))
        tables.append(f"{machine(group[0])}; the parts of the peak in GiB:\n\n{table}")
    return "\n\n".join(tables)


def _table_line(row: Row) -> tuple[str, ...]:
    config = row.config
    if "snapshot" in config:
        setting = str(config["snapshot"])
    else:
        setting = f"{config.get('size')}, {config.get('batch_size', '?')} x {config.get('context_length', '?')}"
        checkpointing = config.get("activation_checkpointing", "none")
        setting += ", compiled" if config.get("compile") else ""
        setting += "" if checkpointing == "none" else f", checkpointing {checkpointing}"
    step = row.variant if row.status == "ok" else f"{row.variant} ({OUTCOMES[row.status]})"
    if "peak_bytes" not in row.metrics:  # failed before the step
        return (setting, step, *["-"] * (4 + len(_CATEGORIES)))
    at_peak = row.metrics["at_peak_bytes"]
    is_known = isinstance(at_peak, Mapping) and "parameters" in at_peak  # else the recording has only lifetimes
    return (
        setting,
        step,
        str(config.get("attention", "-")),
        str(config.get("precision", "-")),
        number(row, "metrics.peak_bytes", ".3g", 2**30),
        str(row.metrics["peak_phase"]),
        *(number(row, f"metrics.at_peak_bytes.{c}", ".3f", 2**30) if is_known else "-" for c in _CATEGORIES),
    )


def memory_summary(row: Row) -> str:
    """One row in full: the peak by category and by phase, the largest allocations, and how memory was counted."""
    title, m = f"# {title_of(row)}", row.metrics
    if "peak_bytes" not in m:
        return f"{title}\n\n{'out of memory before the step' if row.status == 'oom' else 'failed'}: {row.error}"
    parts = [title]
    if row.error is not None:
        parts.append(f"The step ran out of memory: {row.error}")
    parts += [f"Warning: {warning}" for warning in m["warnings"]]
    total = m["peak_bytes"]
    peak = f"Peak: {size_text(total)} ({total:,} bytes) in {m['peak_phase']}, at {m['peak_ms']:.1f} ms"
    if (allocated := m["allocator"].get("peak_allocated_bytes")) is not None:
        reserved = size_text(m["allocator"].get("peak_reserved_bytes", 0))
        peak += f"; the allocator, which rounds up, counted {size_text(allocated)} and reserved {reserved}"
    categories = [(name, size_text(size), f"{size / (total or 1):.1%}") for name, size in m["at_peak_bytes"].items()]
    phases = [(name, size_text(size)) for name, size in m["phase_peak_bytes"].items()]
    largest = []
    for entry in m["largest"]:
        code = ", from ".join(f"`{line}`" for line in entry["code"]) or "-"
        largest.append((size_text(entry["bytes"]), entry["phase"], entry["category"], entry["name"] or "-", code))
    parts += [
        f"{peak}.",
        markdown_table(["at the peak", "memory", "of it"], categories),
        markdown_table(["phase", "its peak"], phases),
        markdown_table(["largest", "allocated in", "category", "tensor", "by the line"], largest),
    ]
    if m["counted"]:
        residual, parameters = m["counted"]["residual_stream_bytes"], m["counted"]["parameter_bytes"]
        parts.append(
            f"Counted from the shapes: parameters {size_text(parameters)} ({parameters:,} bytes), one activation of "
            f"the residual stream (batch x context x d_model x 4 bytes) {size_text(residual)} ({residual:,} bytes)."
        )
    return "\n\n".join((*parts, note_of(row)))


def draw_timeline(row: Row, path: Path) -> Path:
    """Draw a row's timeline into a PNG; return the path. Raises ValueError for an invalid timeline."""
    return save_picture(timeline_figure(Timeline(**row.metrics["timeline"]), title_of(row)), path)


def draw_timelines(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the timelines of rows into a folder, each named by the fields in which the rows differ; return the files."""
    drawn = [row for row in rows if "timeline" in row.metrics]  # older rows have none
    differing = [name for name in (*KEYS, "mode", MACHINE) if differ(drawn, name)]
    files = []
    for row in drawn:
        name = "-".join([row.case, "timeline", *(label(name, row) for name in differing)])
        files.append(draw_timeline(row, folder / (re.sub(r"[^\w.]+", "-", name) + ".png")))
    return files


VIEW = View(
    keys=KEYS,
    columns=(
        Column("peak (GiB)", "peak_bytes", ".3f", 2**30),
        Column("in", "peak_phase", "s"),
        *(Column(f"{name} (GiB)", f"at_peak_bytes.{name}", ".3f", 2**30) for name in _CATEGORIES),
    ),
    more=draw_timelines,
)
