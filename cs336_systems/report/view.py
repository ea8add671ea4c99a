"""What is shown of rows, as data: the columns of a table, the axes of a plot. And the tables made from it."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..bench.row import Row
from ..planner.rows import is_of_cpu
from .tables import Fields, markdown_table, plain, row_fields

_WORDS = {  # true, false
    "compile": ("compiled", "eager"),
    "is_causal": ("causal", "not causal"),
    "cuda_graph": ("CUDA graph", "no CUDA graph"),
}
_UNITS = {"bucket_size_mb": "bucket size (MiB)"}  # its name says another unit
OUTCOMES = {"oom": "out of memory", "error": "failed"}


@dataclass(frozen=True)
class Column:
    """A number of a row: its name with the unit, its place in `metrics`, its format; with the format "s", a text."""

    name: str
    where: str
    form: str = ".2f"
    unit: int = 1
    """What it is divided by: 2**30 turns bytes into GiB."""

    def text(self, fields: Fields) -> str:
        """Its text in a table; "-" if this row has none."""
        where = f"metrics.{self.where}"
        if not fields.has(where):
            return "-"
        return str(fields.get(where)) if self.form == "s" else fields.number(where, self.form, self.unit)

    def value(self, row: Row) -> float | None:
        """The number itself."""
        found = row_fields(row)
        return found.value(f"metrics.{self.where}") / self.unit if found.has(f"metrics.{self.where}") else None


@dataclass(frozen=True)
class Spread(Column):
    """A time of a row as its mean and standard deviation."""

    def text(self, fields: Fields) -> str:
        """As "12.34 ± 0.56"; "-" where this row has none."""
        parts = [Column(self.name, f"{self.where}.{name}", self.form, self.unit) for name in ("mean", "std")]
        return " ± ".join(part.text(fields) for part in parts) if fields.has(f"metrics.{self.where}") else "-"


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A picture: a column of the rows over one of their fields, with a line or bars for each value of some others.

    A row without that field is a horizontal line, because what it measures does not depend on it.
    Bars that share a single x are horizontal, one below the other.
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
    files: Mapping[str, Iterable[Any]] = field(default_factory=dict)
    """Fields whose values have a file of their own, and their possible values."""
    beside: Column | None = None
    """In a line plot, a second, dashed column: a prediction of the first."""
    each: Callable[[Row], Sequence[Row]] = lambda row: [row]
    """The points that are drawn of a row, if it has several."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The table and the plots of a case."""

    keys: tuple[str, ...]
    """Fields that tell rows apart: those that differ among the rows are columns, the others are shown above.

    Of rows with equal keys, variant and machine, the last is shown.
    """
    columns: tuple[Column, ...]
    plots: tuple[Plot, ...] = ()
    derive: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    """Rows with what follows from several of them, such as speed-ups."""
    note: Column | None = None
    """A text of the rows for below the table, once if all have the same: what their times measure."""
    details: Callable[[Row], str] | None = None
    """What follows the table for each row that is ok."""
    write: Callable[[Sequence[Row], Path], list[Path]] | None = None
    """Writes files with names of their own into a folder, instead of the table and the plots."""
    more: Callable[[Sequence[Row], Path], list[Path]] | None = None
    """Writes more files into a folder, besides the table and the plots."""


MACHINE = "machine"
"""The name, among the fields of rows, of the machine that a row is of."""


def machine(row: Row) -> str:
    """The machine of a row, for a person."""
    return f"CPU, {row.env.get('cpu_threads')} threads" if is_of_cpu(row) else str(row.env["gpu"])


def value_of(row: Row, name: str) -> Any:
    """A field of a row's configuration, or its machine."""
    return machine(row) if name == MACHINE else row.config.get(name)


def differ(rows: Sequence[Row], name: str) -> bool:
    """Whether rows have more than one value of a field, or of MACHINE."""
    return len({str(value_of(row, name)) for row in rows}) > 1


def grouped(rows: Iterable[Row], names: Sequence[str]) -> list[list[Row]]:
    """Rows grouped by their machine and their values of some fields, in their order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str([value_of(row, name) for name in (MACHINE, *names)]), []).append(row)
    return list(groups.values())


def runs(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of a file by their run, that is, by all of their environment except the momentary state of the GPU."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(sorted((k, v) for k, v in row.env.items() if not isinstance(v, dict))), []).append(row)
    return list(found.values())


def latest(rows: Iterable[Row], keys: Sequence[str]) -> list[Row]:
    """The last of all rows with the same variant, machine and keys, in the order in which they first came.

    The keys are those of a view, not the whole configuration, because a failed row says less of itself than one that
    ran, and a row of today may have fields that did not exist before.
    """
    found: dict[str, Row] = {}
    for row in rows:
        found[f"{row.variant} {[value_of(row, name) for name in (MACHINE, *keys)]}"] = row
    return list(found.values())


def common_facts(rows: Sequence[Row], keys: Sequence[str]) -> tuple[str, list[str]]:
    """Machine and fields that all rows have in common, as a line; and the names of those in which they differ."""
    differing = [name for name in (MACHINE, *keys) if differ(rows, name)]
    common = {name: value_of(rows[0], name) for name in keys if name not in differing}
    facts = [f"{name} {plain(show(value, name))}" for name, value in common.items() if value is not None]
    return "; ".join([*([] if MACHINE in differing else [machine(rows[0])]), *facts]), differing


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
        if row.status != "ok":  # it may still have some numbers, such as what it would have needed
            cells[:1] = [OUTCOMES[row.status]]
        what = [show(value_of(row, name), name) for name in differing] or [row.variant]
        lines.append([*map(plain, what), *cells])
    names = [field_in_words(name) for name in differing] or ["variant"]
    header = [*names, *([column.name for column in shown] or ["outcome"])]
    main = "\n\n".join([*([f"{facts}:"] if facts else []), markdown_table(header, lines, left=len(names))])
    reasons = dict.fromkeys(f"- failed: {plain(row.error or '')}" for row in rows if row.status == "error")
    main = "\n\n".join([main, *_notes(rows, view.note), *(["\n".join(reasons)] if reasons else [])])
    return "\n\n".join([main, *(view.details(row) for row in rows if view.details and row.status == "ok")])


def _notes(rows: Sequence[Row], note: Column | None) -> list[str]:
    texts = dict.fromkeys(note.text(row_fields(row)) for row in rows) if note else {}
    return [f"{note.name}: {text}." for text in texts if note and text != "-"]


def show(value: Any, name: str = "") -> str:
    """A configuration's value for a person; name: of its field, which may have a unit."""
    if name == "bytes" and isinstance(value, int):
        return f"{value / 1e6:g} MB"  # always the same unit, so that a column of them can be sorted
    if isinstance(value, list | tuple):
        return "x".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)  # the short form if it is the same number
    return {True: "yes", False: "no", None: "-"}[value] if isinstance(value, bool | None) else str(value)


def field_in_words(name: str) -> str:
    """A field's name for a person, at the head of a column or beside an axis."""
    return _UNITS.get(name, name.replace("_", " "))


def label(name: str, row: Row) -> str:
    """A field of a row in a legend: the value, with the name if it is a number; only the name if it is on or off."""
    value = value_of(row, name)
    if isinstance(value, bool):
        return _WORDS.get(name, (name, f"no {name}"))[not value]
    return f"{name.replace('_', ' ')} {show(value)}" if isinstance(value, int | float) else show(value)


def csv_text(rows: Sequence[Row], view: View) -> str:
    """The rows as CSV: every field of their configurations, the outcome, and the columns of the view, unrounded."""
    names = list(dict.fromkeys(name for row in rows for name in row.config))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["variant", MACHINE, *names, "status", *(column.where for column in view.columns), "error"])
    for row in rows:
        fields = row_fields(row)
        metrics = [fields.get(f"metrics.{c.where}") if fields.has(f"metrics.{c.where}") else "" for c in view.columns]
        config = [show(value) if isinstance(value, list) else value for value in map(row.config.get, names)]
        writer.writerow([row.variant, machine(row), *config, row.status, *metrics, row.error or ""])
    return out.getvalue()
