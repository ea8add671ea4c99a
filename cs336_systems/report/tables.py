"""Rows as a Markdown table and as CSV, by the view of their case."""

import csv
import io
from collections.abc import Sequence

from ..bench.row import Row
from .fields import get
from .markdown import markdown_table, plain
from .selection import MACHINE, OUTCOMES, common_facts, field_in_words, machine, show, value_of
from .spec import View


def table(rows: Sequence[Row], view: View) -> str:
    """A Markdown table with a line for each row, below a line of the fields that all rows share.

    Columns without any value are left out.
    """
    facts, differing = common_facts(rows, view.keys)
    shown = [column for column in view.columns if any(column.text(row) != "-" for row in rows)]
    lines = []
    for row in rows:
        cells = [column.text(row) for column in shown]
        if row.status != "ok":  # other metrics stay, such as the memory that it would have needed
            cells[:1] = [OUTCOMES[row.status]]
        setting = [show(value_of(row, name), name) for name in differing] or [row.variant]
        lines.append([*map(plain, setting), *cells])
    names = [field_in_words(name) for name in differing] or ["variant"]
    header = [*names, *([column.name for column in shown] or ["outcome"])]
    parts = [f"{facts}:"] if facts else []
    parts.append(markdown_table(header, lines, left=len(names)))
    if errors := dict.fromkeys(f"- failed: {plain(row.error or '')}" for row in rows if row.status == "error"):
        parts.append("\n".join(errors))
    details = dict.fromkeys(view.details(row) for row in rows if view.details and row.status == "ok")
    return "\n\n".join([*parts, *filter(None, details)])


def csv_text(rows: Sequence[Row], view: View) -> str:
    """The rows as CSV: variant, machine, whole configuration, status, the view's metrics unrounded, and the error."""
    names = list(dict.fromkeys(name for row in rows for name in row.config))
    metrics = [column.metric for column in view.columns]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variant", MACHINE, *names, "status", *metrics, "error"])
    for row in rows:
        values = [get(row, f"metrics.{name}", None) for name in metrics]
        config = [show(value) if isinstance(value, list) else value for value in map(row.config.get, names)]
        writer.writerow([row.variant, machine(row), *config, row.status, *values, row.error or ""])
    return out.getvalue()
