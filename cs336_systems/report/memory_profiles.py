"""Rows of `profile-memory`: one in full, and the timelines as pictures."""

import re
from collections.abc import Sequence
from pathlib import Path

from ..bench.profiling.phases import CATEGORIES
from ..bench.profiling.timeline import Timeline, note_of, size_text, timeline_figure, title_of
from ..bench.row import Row
from .markdown import markdown_table
from .pictures import save_picture
from .selection import MACHINE, differ, label
from .spec import Column, View

KEYS = ("snapshot", "size", "vocab_size", "batch_size", "context_length", "mode", "compile",
        "activation_checkpointing", "attention", "precision", "optimizer")  # fmt: skip


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


def draw_timelines(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the timelines of rows into a folder, each named by the fields in which the rows differ; return the files."""
    drawn = [row for row in rows if "timeline" in row.metrics]  # older rows have none
    differing = [name for name in (*KEYS, MACHINE) if differ(drawn, name)]
    files = []
    for row in drawn:
        name = "-".join([row.case, "timeline", *(label(name, row) for name in differing)])
        figure = timeline_figure(Timeline(**row.metrics["timeline"]), title_of(row))
        files.append(save_picture(figure, folder / (re.sub(r"[^\w.]+", "-", name) + ".png")))
    return files


VIEW = View(
    keys=KEYS,
    columns=(
        Column("peak (GiB)", "peak_bytes", ".3f", 2**30),
        Column("in", "peak_phase", "s"),
        *(Column(f"{name} (GiB)", f"at_peak_bytes.{name}", ".3f", 2**30) for name in CATEGORIES),
    ),
    more=draw_timelines,
)
