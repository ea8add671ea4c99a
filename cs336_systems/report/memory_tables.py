"""Rows of the case `profile-memory` as tables: many on one page, or one in full."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.profiling.captions import note_of, size_text, title_of
from ..bench.row import Row
from .tables import markdown_table, row_fields
from .view import OUTCOMES, grouped, latest, machine

KEYS = ("snapshot", "size", "vocab_size", "batch_size", "context_length", "compile", "activation_checkpointing",
         "attention", "precision", "optimizer")  # fmt: skip
SHOWN = ("parameters", "optimizer state", "gradients", "activations", "temporaries", "other")


def memory_table(rows: Sequence[Row]) -> str:
    """A line per row: the peak, its phase and its parts, in GiB. Raises ValueError for a row without these."""

    def line(row: Row) -> tuple[str, ...]:
        fields, config = row_fields(row), row.config
        if "snapshot" in config:
            what = str(config["snapshot"])
        else:
            what = f"{config.get('size')}, {config.get('batch_size', '?')} x {config.get('context_length', '?')}"
            checkpointing = config.get("activation_checkpointing", "none")
            what += ", compiled" if config.get("compile") else ""
            what += "" if checkpointing == "none" else f", checkpointing {checkpointing}"
        failed = "" if row.status == "ok" else f" ({OUTCOMES[row.status]})"
        if "peak_bytes" not in row.metrics:  # it failed before the step
            return (what, row.variant + failed, *["-"] * (4 + len(SHOWN)))
        at_peak = fields.get("metrics.at_peak_bytes")
        known = isinstance(at_peak, Mapping) and "parameters" in at_peak
        return (
            what,
            row.variant + failed,
            str(config.get("attention", "-")),
            str(config.get("precision", "-")),
            fields.number("metrics.peak_bytes", ".3g", 2**30),
            str(fields.get("metrics.peak_phase")),
            *(fields.number(f"metrics.at_peak_bytes.{name}", ".3f", 2**30) if known else "-" for name in SHOWN),
        )

    header = ["size", "step", "attention", "precision", "peak (GiB)", "in", *SHOWN]
    tables = []
    for group in grouped(rows, ()):
        table = markdown_table(header, map(line, latest(group, KEYS)))
        tables.append(f"{machine(group[0])}; what the peak consists of in GiB:\n\n{table}")
    return "\n\n".join(tables)


def memory_summary(row: Row) -> str:
    """One row in full, as Markdown: the peak by category and by phase, the largest allocations, what is counted."""
    title = f"# {title_of(row)}"
    if "peak_bytes" not in row.metrics:
        return f"{title}\n\n{'out of memory before the step' if row.status == 'oom' else 'failed'}: {row.error}"
    m = row.metrics
    parts = [title]
    if row.error is not None:
        parts.append(f"The step ran out of memory: {row.error}")
    parts += [f"Warning: {warning}" for warning in m["warnings"]]
    parts += [_peak(m), _categories(m), _phases(m), _largest(m)]
    if m["counted"]:
        parts.append(_counted(m))
    return "\n\n".join((*parts, note_of(row)))


def _peak(m: Mapping[str, Any]) -> str:
    size = m["peak_bytes"]
    peak = f"Peak: {size_text(size)} ({size:,} bytes) in {m['peak_phase']}, at {m['peak_ms']:.1f} ms"
    allocated = m["allocator"].get("peak_allocated_bytes")
    if allocated is None:
        return f"{peak}."
    reserved = m["allocator"].get("peak_reserved_bytes", 0)
    return f"{peak}; the allocator, which rounds up, counted {size_text(allocated)} and reserved {size_text(reserved)}."


def _categories(m: Mapping[str, Any]) -> str:

    peak = m["peak_bytes"] or 1
    lines = [(name, size_text(size), f"{size / peak:.1%}") for name, size in m["at_peak_bytes"].items()]
    return markdown_table(["at the peak", "memory", "of it"], lines)


def _phases(m: Mapping[str, Any]) -> str:

    return markdown_table(["phase", "its peak"], [(name, size_text(v)) for name, v in m["phase_peak_bytes"].items()])


def _largest(m: Mapping[str, Any]) -> str:

    def line(entry: Mapping[str, Any]) -> tuple[str, ...]:
        what = ", from ".join(f"`{code}`" for code in entry["code"]) or "-"
        return (size_text(entry["bytes"]), entry["phase"], entry["category"], entry["name"] or "-", what)

    header = ["largest", "allocated in", "category", "tensor", "by the line"]
    return markdown_table(header, map(line, m["largest"]))


def _counted(m: Mapping[str, Any]) -> str:
    residual, parameters = m["counted"]["residual_stream_bytes"], m["counted"]["parameter_bytes"]
    return (
        f"Counted from the shapes: parameters {size_text(parameters)} ({parameters:,} bytes), one activation of the "
        f"residual stream (batch x context x d_model x 4 bytes) {size_text(residual)} ({residual:,} bytes)."
    )
