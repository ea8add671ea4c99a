"""A table with a line a setting, in which two ways to do the same stand side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...bench.row import Row
from ..markdown import markdown_table
from ..selection import OUTCOMES, common_facts, show, value_of
from ..spec import Column


def side_by_side(
    rows: Sequence[Row],
    keys: Sequence[str],
    field: str,
    ways: Mapping[Any, str],
    columns: Sequence[Column],
    ratios: Sequence[Column] = (),
) -> str:
    """A line for each setting of some rows, with the columns of each way beside each other; "" where there is none.

    keys: fields that tell settings apart, `field` being that by whose values the ways are known; ways: their names in
    the table. ratios: columns of the last way alone, such as what it gains over the first.
    """
    rows = [row for row in rows if row.config.get(field) in ways]
    if not rows:
        return ""
    facts, differing = common_facts(rows, [name for name in keys if name != field])
    lines: dict[tuple[str, ...], dict[Any, Row]] = {}
    for row in rows:
        setting = tuple(show(value_of(row, name), name) for name in differing)
        lines.setdefault(setting, {})[row.config[field]] = row
    last = list(ways)[-1]
    names = [name.replace("_", " ") for name in differing]
    header = [*names, *(_named(column, way) for column in columns for way in ways.values()), *(c.name for c in ratios)]
    cells = [
        [*setting, *(_cell(found.get(way), column) for column in columns for way in ways),
         *(_cell(found.get(last), column) for column in ratios)]
        for setting, found in lines.items()
    ]  # fmt: skip
    return f"{facts}:\n\n{markdown_table(header, cells, left=len(names))}"


def _named(column: Column, way: str) -> str:
    """ "forward, eager (ms)" of "forward (ms)"."""
    name, bracket, unit = column.name.partition(" (")
    return f"{name}, {way}{bracket}{unit}"


def _cell(row: Row | None, column: Column) -> str:
    if row is None:
        return "-"
    return column.text(row) if row.status == "ok" else OUTCOMES[row.status]
