"""How rows are shown, as data: the columns of a table, the axes of a plot, and the view of a case."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..bench.row import Row
from .fields import get, number


@dataclass(frozen=True)
class Column:
    """A metric as a column of a table. The format "s" is for text."""

    name: str
    """The header, with the unit."""
    metric: str
    """The dotted name in `metrics`."""
    form: str = ".2f"
    unit: int = 1
    """The divisor: 2**30 turns bytes into GiB."""

    def text(self, row: Row) -> str:
        """The formatted value, or "-" if the row has none."""
        if get(row, f"metrics.{self.metric}", None) is None:
            return "-"
        return number(row, f"metrics.{self.metric}", self.form, self.unit)

    def value(self, row: Row) -> float | None:
        """The number itself, or None if the row has none."""
        value = get(row, f"metrics.{self.metric}", None)
        return None if value is None else value / self.unit


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A metric over a field of the configuration, with a line or bars for each value of some other fields.

    A row without the x field is a horizontal line, because its metric does not depend on that field.
    """

    name: str
    y: Column
    x: str
    lines: tuple[str, ...]
    kind: Literal["line", "bar"] = "line"
    log: str = ""
    """The logarithmic axes: x, y or xy."""
    panels: tuple[str, ...] = ()
    """Fields whose values get axes of their own within one picture."""
    files: tuple[str, ...] = ()
    """Fields whose values get a picture of their own."""
    beside: Column | None = None
    """A second, dashed column of a line plot, such as a prediction."""
    points: Callable[[Row], Sequence[Row]] = lambda row: [row]
    """Splits a row into several points."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The table and the plots of a case."""

    keys: tuple[str, ...]
    """Fields that tell rows apart. Fields that differ among the rows are columns; the others are named above the table.

    If rows agree in keys, variant and machine, only the last is shown.
    """
    columns: tuple[Column, ...]
    plots: tuple[Plot, ...] = ()
    derive: Callable[[Sequence[Row]], Sequence[Row]] = lambda rows: rows
    """Adds metrics that compare several rows, such as speed-ups."""
    details: Callable[[Row], str] | None = None
    """Text below the table for each successful row, or ''; equal texts are written once."""
    more: Callable[[Sequence[Row], Path], list[Path]] | None = None
    """Writes further files beside the table and the plots."""
