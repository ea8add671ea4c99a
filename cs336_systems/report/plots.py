"""Plots of rows, as PNG. A kernel has the same colour and marker in all of them."""

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..bench.row import Row
from .pictures import save_picture
from .tables import row_fields
from .view import MACHINE, Column, Plot, common_facts, differ, field_in_words, label, show

KERNEL_COLORS = {
    "naive": "#000000",
    "vectorized_torch": "#8a8a8a",
    "flash_torch": "#8c564b",
    "flash_triton": "#d62728",
    "flash_cuda": "#ff9f1c",
    "sdpa": "#1f4ea8",
    "sdpa_flash": "#17a6c4",
    "sdpa_cudnn": "#9467bd",
    "sdpa_math": "#b5b822",
    "flex": "#2ca02c",
    "fa4": "#e377c2",
    "flash_triton_compiled": "#f4a582",
    "flash_triton_simple": "#7f1d1d",
}
"""Plain attention grey, this project's kernels warm, those of others cool."""
KERNEL_MARKERS = dict(zip(KERNEL_COLORS, "sDPov^<>XhHpd*8", strict=False))


def draw(plot: Plot, rows: Sequence[Row], path: Path, keys: Sequence[str] = ()) -> list[Path]:
    """Draw rows into a PNG, or one for each value of the fields in `plot.files`; return the files.

    Rows without the number are left out. So are line plots with a single x, which show no more than the table. keys:
    fields to show above the picture if they are the same in all rows.
    """
    parts = _parts(_measured(plot, rows), plot.files)
    files = []
    for part in parts or [[]]:
        if plot.kind == "line" and len({_x(plot, row) for row in part}) < 2:
            continue
        ends = [show(part[0].config.get(name)) for name in plot.files] if len(parts) > 1 else []
        file = path.with_name("-".join([path.stem, *ends]) + path.suffix)
        files.append(save_picture(figure_of(plot, part, keys), file))
    return files


def redraw(plot: Plot, rows: Sequence[Row], path: Path, keys: Sequence[str] = ()) -> list[Path]:
    """`draw` if there is a number, and remove earlier drawings that are not drawn any more; return the files."""
    files = draw(plot, rows, path, keys) if _measured(plot, rows) else []
    ends = itertools.product(*plot.files.values()) if plot.files else ()
    for known in (path, *(path.with_name("-".join([path.stem, *map(show, end)]) + path.suffix) for end in ends)):
        if known not in files:
            known.unlink(missing_ok=True)
    return files


def _measured(plot: Plot, rows: Sequence[Row]) -> list[Row]:
    """The points that are drawn of rows."""
    return [point for row in rows for point in plot.each(row) if plot.y.value(point) is not None]


def _parts(rows: Sequence[Row], fields: Collection[str]) -> list[list[Row]]:
    """Rows by their values of some fields, in rising order if the values have an order."""
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(row.config.get(name) for name in fields), []).append(row)
    return [parts[key] for key in _in_order(parts)]


def _in_order(values: Any) -> list[Any]:
    """Numbers, or tuples of them, in rising order; others as they come."""
    values = list(dict.fromkeys(values))
    parts = itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in values)
    return sorted(values) if all(isinstance(part, int | float) for part in parts) else values


def figure_of(plot: Plot, rows: Sequence[Row], keys: Sequence[str]) -> Any:
    """The picture of rows, a panel for each value of the fields in `plot.panels`.

    Raises ValueError naming a row that has no place on the axes.
    """
    from matplotlib.figure import Figure

    if plot.kind == "line":
        _check_axes(plot, rows)
    if plot.kind == "bar" and not plot.panels and len({_x(plot, row) for row in rows}) == 1:
        return _one_group(plot, rows, keys)
    panels = _parts(rows, [name for name in plot.panels if differ(rows, name)]) or [[]]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(8, 4.5) if len(panels) == 1 else (9, 1.2 + 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    differing = _differing(plot, rows, keys)
    colors: dict[str, str] = {}
    for axes, part in zip(grid, panels, strict=False):
        _fill(axes, plot, part, differing, colors, _in_order(x for row in rows if (x := _x(plot, row)) is not None))
        if len(panels) > 1:
            axes.tick_params("x", labelsize=7.5)
            names = [name for name in plot.panels if differ(rows, name)]
            axes.set_title(", ".join(f"{n.replace('_', ' ')} {show(part[0].config.get(n))}" for n in names), fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(plot.y.name)
    for axes in grid[max(0, len(panels) - columns) : len(panels)]:  # with nothing below them
        axes.set_xlabel(field_in_words(plot.x))
        axes.tick_params("x", labelbottom=True)
    known = {name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(known) > 1:
        columns = max(1, min(5, 110 // max(len(name) + 6 for name in known)))
        figure.legend([*known.values()], [*known], frameon=False, fontsize=8, loc="outside lower center", ncols=columns)
    if rows and keys:
        put_title(figure, common_facts(rows, keys)[0].replace("_", " "))
    return figure


def _check_axes(plot: Plot, rows: Sequence[Row]) -> None:
    for row in rows:
        fields = row_fields(row)
        if fields.has(f"config.{plot.x}"):
            fields.value(f"config.{plot.x}")
    above = [value > 0 for row in rows if (value := plot.y.value(row)) is not None]
    if "y" in plot.log and above and not any(above):
        raise ValueError(f"{row_fields(rows[0]).where} has no metrics.{plot.y.where} above 0, nor has any other")


def _differing(plot: Plot, rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Fields that tell the lines apart, including those that the plot does not name but in which rows differ."""
    elsewhere = (plot.x, *plot.panels, *plot.files)
    return [
        name for name in dict.fromkeys((*plot.lines, *keys, MACHINE)) if name not in elsewhere and differ(rows, name)
    ]


def _one_group(plot: Plot, rows: Sequence[Row], keys: Sequence[str]) -> Any:
    """Bars that share a single x: horizontal, named, the shortest on top, each with its number at the end."""
    from matplotlib.figure import Figure

    lines = _lines(plot, rows, plot.y, _differing(plot, rows, keys))
    values = {name: next(iter(points.values())) for name, points in lines.items()}
    names = sorted(values, key=lambda name: values[name])
    figure = Figure(figsize=(8, 1.4 + 0.4 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        bar = axes.barh(place, values[name], 0.7, color=KERNEL_COLORS.get(name) or f"C{list(values).index(name)}")
        axes.bar_label(bar, [format(values[name], plot.y.form)], padding=4, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)  # room for the numbers
    axes.set_xlabel(plot.y.name)
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if keys:
        put_title(figure, common_facts(rows, list(dict.fromkeys((*keys, plot.x))))[0].replace("_", " "))
    return figure


def put_title(figure: Any, text: str) -> None:
    """A line above a picture, from its left edge on."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=8, wrap=True)


def _x(plot: Plot, row: Row) -> Any:
    value = row.config.get(plot.x)
    return tuple(value) if isinstance(value, list) else value


def _lines(plot: Plot, rows: Sequence[Row], column: Column, differing: Sequence[str]) -> dict[str, dict[Any, float]]:
    """The values of a column over the plot's field, by the name of their line."""
    lines: dict[str, dict[Any, float]] = {}
    for row in rows:
        name = " ".join(label(field, row) for field in differing) or row.case
        if (value := column.value(row)) is not None:
            lines.setdefault(name, {})[_x(plot, row)] = value
    return lines


def _draw_line(axes: Any, points: dict[Any, float], xs: Sequence[Any], **style: Any) -> None:
    if None in points:  # it does not depend on the field
        axes.axhline(points[None], lw=1.4, **{name: value for name, value in style.items() if name != "marker"})
    elif points:
        found = [x for x in xs if x in points]
        style.setdefault("marker", "x" if len(found) == 1 else None)  # one point is no line
        axes.plot(found, [points[x] for x in found], ms=4, lw=1.4, **style)


def _tick(x: Any, field: str) -> str:
    """A value below an axis: of a number with many digits the first three."""
    text = show(x, field)
    return f"{x:.3g}" if isinstance(x, float) and len(text) > 5 else text


def _is_wide(values: Sequence[float]) -> bool:
    """Whether values span so much that a linear axis would hide the small ones."""
    return min(values, default=1.0) > 0 and max(values, default=1.0) > 10 * min(values, default=1.0)


def _plain_number(value: float, _: Any = None) -> str:
    """A label of a logarithmic axis, only if its first digit is 1, 2 or 5; written as 0.2 and not as 2 x 10^-1."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _fill(
    axes: Any, plot: Plot, rows: Sequence[Row], differing: Sequence[str], colors: dict[str, str], xs: Sequence[Any]
) -> None:
    """Draw rows into axes, a line or a group of bars for each value of the differing fields."""
    lines = _lines(plot, rows, plot.y, differing)
    beside = {} if plot.beside is None else _lines(plot, rows, plot.beside, differing)
    first, *others = beside.values() or [None]
    of_all = first if others and all(points == first for points in others) else None
    width = 0.8 / max(1, len(lines))
    for i, (name, points) in enumerate(lines.items()):
        color = colors.setdefault(name, KERNEL_COLORS.get(name) or f"C{len(colors)}")
        if plot.kind == "line":
            _draw_line(axes, points, xs, color=color, label=name, marker=KERNEL_MARKERS.get(name, "o"))
            own = {} if of_all else beside.get(name, {})
            _draw_line(axes, own, xs, color=color, label=f"{name}, predicted", linestyle="--")
        else:
            places = [xs.index(x) - 0.4 + width * (i + 0.5) for x in points]
            axes.bar(places, list(points.values()), width, color=color, label=name)
    if of_all:  # the same for every line, and so hidden behind one another
        _draw_line(axes, of_all, xs, color="0.4", label="predicted", linestyle="--")
    names = [_tick(x, plot.x) for x in xs]
    if plot.kind == "bar":
        axes.set_xticks(range(len(xs)), names)
    elif "x" in plot.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, names)
        axes.minorticks_off()
    if plot.kind == "bar" and sum(map(len, names)) > 40:
        axes.tick_params("x", rotation=45)
    values = [value for points in lines.values() for value in points.values()]
    if "y" in plot.log and (plot.kind == "line" or _is_wide(values)):  # a bar's length says nothing on such an axis
        axes.set_yscale("log")
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(_plain_number)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
