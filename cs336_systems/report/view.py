"""What is shown of rows, as data: the columns of a table, the axes of a plot. And tables out of it."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..bench.case import Row
from .tables import Fields, markdown_table, row_fields

OUTCOMES = {"oom": "out of memory", "error": "failed"}


@dataclass(frozen=True)
class Column:
    """A number of a row: its name with the unit, where it is in `metrics`, how it is written; or, with "s", a text."""

    name: str
    where: str
    form: str = ".2f"
    unit: int = 1
    """What it is divided by: 2**30 makes GiB of bytes."""

    def text(self, fields: Fields) -> str:
        """As it stands in a table; "-" where this row has none."""
        where = f"metrics.{self.where}"
        if not fields.has(where):
            return "-"
        return str(fields.get(where)) if self.form == "s" else fields.number(where, self.form, self.unit)

    def value(self, row: Row) -> float | None:
        """The number itself."""
        found = row_fields(row)
        return found.get(f"metrics.{self.where}") / self.unit if found.has(f"metrics.{self.where}") else None


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture: a column of the rows over one of their fields, a line or a group of bars for each of some others.

    A row without that field is a level line of its own: what it measures does not depend on it.
    """

    name: str
    y: Column
    x: str
    lines: tuple[str, ...]
    kind: Literal["line", "bar"] = "line"
    log: str = ""
    """Axes with a logarithmic scale: x, y, xy."""
    panels: tuple[str, ...] = ()
    """Fields whose values have axes of their own, in one file."""
    files: tuple[str, ...] = ()
    """Fields whose values have a file of their own."""
    beside: Column | None = None
    """Of a line plot, a second column, dashed: a prediction of the first."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The table and the plots of a case."""

    keys: tuple[str, ...]
    """Fields that tell rows apart: those that differ among the rows are columns, the others stand above."""
    columns: tuple[Column, ...]
    plots: tuple[Plot, ...] = ()
    derive: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    """Rows with what follows from several of them, such as speed-ups."""
    details: Callable[[Row], str] | None = None
    """What follows the table for each row that is ok."""
    write: Callable[[Sequence[Row], Path], list[Path]] | None = None
    """Writes files of other names than the case's into a folder, instead of the table and the plots."""


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of rows with one configuration and machine the last, in the order in which they first came."""
    found: dict[str, Row] = {}
    for row in rows:
        found[f"{row.variant} {sorted(row.config.items(), key=str)} {row.env.get('gpu')}"] = row
    return list(found.values())


def common_facts(rows: Sequence[Row], keys: Sequence[str]) -> tuple[str, list[str]]:
    """The machines and the fields that all rows have in common, as a line; and the names of those that differ."""
    common, differing = {}, []
    for name in keys:
        values = [row.config.get(name) for row in rows]
        if all(value == values[0] for value in values):
            common[name] = values[0]
        else:
            differing.append(name)
    machines = dict.fromkeys(row.env.get("gpu") or f"CPU, {row.env.get('cpu_threads')} threads" for row in rows)
    facts = [f"{name} {show(value)}" for name, value in common.items() if value is not None]
    return "; ".join([*machines, *facts]), differing


def table(rows: Sequence[Row], view: View) -> str:
    """A table of rows in Markdown, under a line with what they have in common."""
    facts, differing = common_facts(rows, view.keys)
    shown = [column for column in view.columns if any(row_fields(row).has(f"metrics.{column.where}") for row in rows)]
    lines = []
    for row in rows:
        fields = row_fields(row)
        cells = [column.text(fields) for column in shown]
        if row.status == "ok" and all(cell == "-" for cell in cells):
            raise ValueError(f"{fields.where} has no metrics that its table shows")
        if row.status != "ok":  # it may have some numbers all the same, such as those of what it would have needed
            cells[:1] = [OUTCOMES[row.status]]
        lines.append([*([show(row.config.get(name)) for name in differing] or [row.variant]), *cells])
    names = [name.replace("_", " ") for name in differing] or ["variant"]
    header = [*names, *([column.name for column in shown] or ["outcome"])]
    main = f"{facts}:\n\n{markdown_table(header, lines, left=len(names))}"
    return "\n\n".join([main, *(view.details(row) for row in rows if view.details and row.status == "ok")])


def show(value: Any) -> str:
    """A configuration's value for a person."""
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    return {True: "yes", False: "no", None: "-"}[value] if isinstance(value, bool | None) else str(value)


def label(name: str, config: Mapping[str, Any]) -> str:
    """A field in a legend: the value, of what is on or off the name."""
    value = config.get(name)
    return (name if value else f"no {name}") if isinstance(value, bool) else show(value)


def csv_text(rows: Sequence[Row], view: View) -> str:
    """The rows as CSV: every field of their configurations, the outcome, and the columns of the view, unrounded."""
    names = list(dict.fromkeys(name for row in rows for name in row.config))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variant", *names, "status", *(column.where for column in view.columns), "error"])
    for row in rows:
        fields = row_fields(row)
        metrics = [fields.get(f"metrics.{c.where}") if fields.has(f"metrics.{c.where}") else "" for c in view.columns]
        config = [show(value) if isinstance(value, list) else value for value in map(row.config.get, names)]
        writer.writerow([row.variant, *config, row.status, *metrics, row.error or ""])
    return out.getvalue()
