"""What is shown of a case's rows, as data: the columns of its table, the axes of its plots.

A table is Markdown and CSV, a plot PNG, all made of the row file alone.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..bench.case import Row
from .saved_tensors import tensors_table
from .tables import CASE_TABLES, Fields, markdown_table, row_fields

_OUTCOMES = {"oom": "out of memory", "error": "failed"}


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
    beside: Column | None = None
    """Of a line plot, a second column, dashed: a prediction of the first."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The table and the plots of a case."""

    keys: tuple[str, ...]
    """Fields that tell rows apart: those that differ among the rows are columns, the others stand above."""
    columns: tuple[Column, ...]
    plots: tuple[Plot, ...] = ()
    details: Callable[[Row], str] | None = None
    """What follows the table for each row that is ok."""


_TIMES = tuple(Column(f"{phase} (ms)", f"{phase}_ms.p50") for phase in ("forward", "backward", "optimizer"))
_STEP = Column("step (ms)", "step_ms.p50")
_STD = Column("std (ms)", "step_ms.std")
_MODEL_KEYS = ("size", "context_length", "batch_size", "mode", "precision", "compile", "attention",
               "activation_checkpointing", "optimizer", "warmup")  # fmt: skip

VIEWS: dict[str, View] = {
    "model": View(
        keys=_MODEL_KEYS,
        columns=(
            *_TIMES,
            _STEP,
            _STD,
            Column("tokens/s", "tokens_per_s", ",.0f"),
            Column("TFLOP/s", "tflops", ".1f"),
            Column("MFU", "mfu", ".1%"),
            Column("peak (GiB)", "peak_memory_bytes", ".2f", 2**30),
        ),
        plots=(
            Plot(name="step", y=_STEP, x="context_length", lines=("size", "mode", "precision", "compile", "attention"),
                 kind="bar", log="y"),
        ),
    ),
    "warmup": View(
        keys=_MODEL_KEYS,
        columns=(_STEP, Column("mean (ms)", "step_ms.mean"), _STD, Column("first (ms)", "steps_ms.0"),
                 Column("second (ms)", "steps_ms.1"), Column("last (ms)", "steps_ms.-1")),
    ),
    "precision-accumulation": View(
        keys=("accumulation", "value", "count", "device"),
        columns=(Column("sum", "sum", ".7f"), Column("error", "error", "+.7f"), Column("type", "dtype", "s")),
    ),
    "autocast-dtypes": View(
        keys=("norm", "precision", "device"),
        columns=tuple(Column(name.replace("_", " "), f"dtypes.{name}", "s")
                      for name in ("parameters", "fc1_output", "norm_output", "logits", "loss", "gradients")),
    ),
    "residuals": View(
        keys=("size", "context_length", "batch_size", "precision", "compile", "attention"),
        columns=(
            Column("saved (MiB)", "saved_bytes", ".4g", 2**20),
            Column("counted (MiB)", "counted_bytes", ".4g", 2**20),
            *(Column(part.replace("_", " "), f"parts.{part}", ".4g", 2**20)
              for part in ("ln1", "qkv_proj", "attention", "output_proj", "ln2", "ffn")),
            Column("input", "input_bytes", ".4g", 2**20),
            Column("weight copies", "weight_copy_bytes", ".4g", 2**20),
            Column("allocated", "held_bytes", ".4g", 2**20),
            Column("peak", "peak_bytes", ".4g", 2**20),
        ),
        plots=(
            Plot(name="saved", y=Column("saved (MiB)", "saved_bytes", ".4g", 2**20), x="context_length",
                 lines=("size", "precision", "compile", "attention"), kind="bar"),
        ),
        details=tensors_table,
    ),
    "checkpointing": View(
        keys=("size", "num_layers", "context_length", "batch_size", "mode", "precision", "compile", "attention",
              "policy", "K"),
        columns=(
            _STEP,
            _STD,
            Column("kept after forward (GiB)", "held_bytes", ".4g", 2**30),
            Column("predicted (GiB)", "predicted_held_bytes", ".4g", 2**30),
            Column("peak (GiB)", "peak_bytes", ".4g", 2**30),
            Column("predicted (GiB)", "predicted_bytes", ".4g", 2**30),
            Column("sqrt(L I / A)", "best_group", ".1f"),
            Column("with weights and gradients (GiB)", "peak_memory_bytes", ".4g", 2**30),
        ),
        plots=(
            Plot(name="peak", y=Column("peak beyond weights and gradients (GiB)", "peak_bytes", ".4g", 2**30), x="K",
                 lines=("size", "context_length", "precision", "compile", "attention", "policy"), log="x",
                 beside=Column("predicted (GiB)", "predicted_bytes", ".4g", 2**30)),
            Plot(name="step", y=_STEP, x="K", log="x",
                 lines=("size", "context_length", "precision", "compile", "attention", "policy")),
        ),
    ),
}  # fmt: skip


def write_views(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write a table (.md, .csv) and plots (.png) a case into a folder; the files.

    Raises ValueError for rows of a case that has no table.
    """
    files = []
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        files.append(_write(folder / f"{case}.md", _case_table(own) + "\n"))
        if case in VIEWS:
            files.append(_write(folder / f"{case}.csv", csv_text(latest(own))))
            files += [draw(plot, latest(own), folder / f"{case}-{plot.name}.png") for plot in VIEWS[case].plots]
    return files


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def latest(rows: Any) -> list[Row]:
    """Of rows with one configuration and machine the last, in the order in which they first came."""
    found: dict[str, Row] = {}
    for row in rows:
        found[f"{row.variant} {sorted(row.config.items(), key=str)} {row.env.get('gpu')}"] = row
    return list(found.values())


def rows_table(rows: Sequence[Row]) -> str:
    """Tables of rows, one a case, in Markdown.

    Raises ValueError for a case that there is no table for, and for a row without what its table shows.
    """
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    return "\n\n".join(map(_case_table, by_case.values()))


def _case_table(rows: Sequence[Row]) -> str:
    case = rows[0].case
    if case not in CASE_TABLES and case not in VIEWS:
        raise ValueError(f"a row has case {case!r}: it must be one of {', '.join([*CASE_TABLES, *VIEWS])}")
    return CASE_TABLES[case](rows) if case in CASE_TABLES else table(latest(rows))


def _split(rows: Sequence[Row], view: View) -> tuple[dict[str, Any], list[str]]:
    """Fields that all rows have in common, and the names of those in which they differ."""
    common, differing = {}, []
    for name in view.keys:
        values = [row.config.get(name) for row in rows]
        if all(value == values[0] for value in values):
            common[name] = values[0]
        else:
            differing.append(name)
    return common, differing


def table(rows: Sequence[Row]) -> str:
    """The table of a case's rows in Markdown, under a line with what they have in common."""
    view = VIEWS[rows[0].case]
    common, differing = _split(rows, view)
    machines = list(dict.fromkeys(row.env.get("gpu") or f"CPU, {row.env.get('cpu_threads')} threads" for row in rows))
    shown = [column for column in view.columns if any(row_fields(row).has(f"metrics.{column.where}") for row in rows)]
    lines = []
    for row in rows:
        keys = [show(row.config.get(name)) for name in differing] or [row.variant]
        if row.status == "ok":
            fields = row_fields(row)
            lines.append([*keys, *(column.text(fields) for column in shown)])
        else:
            lines.append([*keys, *[_OUTCOMES[row.status], *["-"] * len(shown)][: max(1, len(shown))]])
    facts = "; ".join([*machines, *(f"{name} {show(value)}" for name, value in common.items() if value is not None)])
    names = [name.replace("_", " ") for name in differing] or ["variant"]
    details = [view.details(row) for row in rows if row.status == "ok"] if view.details else []
    main = f"{facts}:\n\n" + markdown_table([*names, *([c.name for c in shown] or ["outcome"])], lines)
    return "\n\n".join([main, *details])


def show(value: Any) -> str:
    """A configuration's value for a person."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return {True: "yes", False: "no", None: "-"}[value] if isinstance(value, bool | None) else str(value)


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV: every field of their configurations, the outcome, and the columns of the view, unrounded."""
    view = VIEWS[rows[0].case]
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


def draw(plot: Plot, rows: Sequence[Row], path: Path) -> Path:
    """Draw rows into a PNG; those without the number are left out."""
    from matplotlib.figure import Figure

    lines = _lines(plot, rows, plot.y)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    xs = sorted({x for points in lines.values() for x in points if x is not None})
    if plot.kind == "line":
        _draw_lines(axes, lines, {} if plot.beside is None else _lines(plot, rows, plot.beside))
        if "x" in plot.log:
            axes.set_xscale("log", base=2)
            axes.set_xticks(xs, map(show, xs))
            axes.minorticks_off()
    else:
        width = 0.8 / max(1, len(lines))
        for i, (label, points) in enumerate(lines.items()):
            axes.bar([xs.index(x) - 0.4 + width * (i + 0.5) for x in points], list(points.values()), width, label=label)
        axes.set_xticks(range(len(xs)), map(show, xs))
    if "y" in plot.log:
        axes.set_yscale("log")
    axes.set_xlabel(plot.x.replace("_", " "))
    axes.set_ylabel(plot.y.name)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _lines(plot: Plot, rows: Sequence[Row], column: Column) -> dict[str, dict[Any, float]]:
    """A column over the field of the plot, by the label of its line."""
    measured = [row for row in rows if plot.y.value(row) is not None]
    differing = [name for name in plot.lines if len({str(row.config.get(name)) for row in measured}) > 1]
    lines: dict[str, dict[Any, float]] = {}
    for row in measured:
        label = " ".join(_label(name, row.config) for name in differing) or row.case
        if (value := column.value(row)) is not None:
            lines.setdefault(label, {})[row.config[plot.x]] = value
    return lines


def _draw_lines(axes: Any, lines: Mapping[str, Mapping[Any, float]], beside: Mapping[str, Mapping[Any, float]]) -> None:
    for number, (label, points) in enumerate(lines.items()):
        for which, style, name in ((points, "-", label), (beside.get(label, {}), "--", f"{label}, predicted")):
            drawn: dict[str, Any] = dict(color=f"C{number}", linestyle=style, label=name)
            if None in which:
                axes.axhline(which[None], **drawn)
            elif which:
                xs = sorted(which)
                axes.plot(xs, [which[x] for x in xs], marker="o" if style == "-" else "", **drawn)


def _label(name: str, config: Mapping[str, Any]) -> str:
    value = config.get(name)
    return (name if value else f"no {name}") if isinstance(value, bool) else show(value)
