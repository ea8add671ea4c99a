"""Plots of rows, as PNG. A kernel has the same colour and marker in all of them."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.row import Row
from .pictures import save_picture
from .selection import MACHINE, common_facts, differ, field_in_words, grouped_by, label, show
from .spec import Column, Plot

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
"""Plain attention is grey, this project's kernels are warm colours, others cool ones."""
KERNEL_MARKERS = dict(zip(KERNEL_COLORS, "sDPov^<>XhHpd*8", strict=False))


def draw(plot: Plot, rows: Sequence[Row], path: Path, keys: Sequence[str] = ()) -> list[Path]:
    """Draw rows into a PNG, or into one for each value of the fields in `plot.files`; return the files.

    Rows without the metric are left out. So is a line plot with a single x, because the table shows as much. Keys that
    all rows share are named above the picture.
    """
    points = [point for row in rows for point in plot.points(row) if plot.y.value(point) is not None]
    files = []
    for part in _split(points, plot.files):
        if plot.kind == "bar" or len({_x(plot, row) for row in part}) > 1:
            ends = [show(part[0].config.get(name)) for name in plot.files]
            file = path.with_name("-".join([path.stem, *ends]) + path.suffix)
            files.append(save_picture(figure_of(plot, part, keys), file))
    return files


def _split(rows: Sequence[Row], fields: Collection[str]) -> list[list[Row]]:
    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row.config.get(name) for name in fields)

    parts = {key(part[0]): part for part in grouped_by(rows, key)}
    return [parts[each] for each in _in_order(parts)]


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Distinct values: numbers, or tuples of numbers, in rising order; others in order of first appearance."""
    distinct = list(dict.fromkeys(values))
    parts = itertools.chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in distinct)
    return sorted(distinct) if all(isinstance(part, int | float) for part in parts) else distinct


def _x(plot: Plot, row: Row) -> Any:
    value = row.config.get(plot.x)
    return tuple(value) if isinstance(value, list) else value


def figure_of(plot: Plot, rows: Sequence[Row], keys: Sequence[str]) -> Any:
    """The picture of rows, with a panel for each value of the fields in `plot.panels`."""
    placed = (plot.x, *plot.panels, *plot.files)
    names = dict.fromkeys((*plot.lines, *keys, MACHINE))  # lines differ in fields that the plot does not name, too
    differing = [name for name in names if name not in placed and differ(rows, name)]
    figure = _panels(plot, rows, differing)
    if rows and keys:
        put_title(figure, common_facts(rows, keys)[0].replace("_", " "))
    return figure


def put_title(figure: Any, text: str) -> None:
    """Write a line above a picture, beginning at its left edge."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=8, wrap=True)


def stack_bars(axes: Any, bars: Sequence[Mapping[str, float]], colors: Mapping[str, str], **style: Any) -> None:
    """Draw horizontal bars, the first on top, each divided into its parts. A part that is 0 in all is left out."""
    left = [0.0] * len(bars)
    for part in dict.fromkeys(part for bar in bars for part in bar):
        widths = [max(0.0, bar.get(part, 0.0)) for bar in bars]
        if any(widths):
            name = part.replace("_", " ")
            axes.barh(range(len(bars)), widths, left=left, color=colors[part], label=name, **style)
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()


def _panels(plot: Plot, rows: Sequence[Row], differing: Sequence[str]) -> Any:
    from matplotlib.figure import Figure

    split_by = [name for name in plot.panels if differ(rows, name)]
    panels = _split(rows, split_by) or [[]]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(8, 4.5) if len(panels) == 1 else (9, 1.2 + 3.2 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    xs = _in_order(x for row in rows if (x := _x(plot, row)) is not None)
    colors: dict[str, str] = {}
    for axes, part in zip(grid, panels, strict=False):
        _fill(axes, plot, part, differing, colors, xs)
        if len(panels) > 1:
            axes.tick_params("x", labelsize=7.5)
            title = ", ".join(f"{name.replace('_', ' ')} {show(part[0].config.get(name))}" for name in split_by)
            axes.set_title(title, fontsize=9)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(plot.y.name)
    for axes in grid[max(0, len(panels) - columns) : len(panels)]:  # the lowest panel of each column
        axes.set_xlabel(field_in_words(plot.x))
        axes.tick_params("x", labelbottom=True)
    known = {name: line for axes in grid for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(known) > 1:
        columns = max(1, min(5, 110 // max(len(name) + 6 for name in known)))
        figure.legend([*known.values()], [*known], frameon=False, fontsize=8, loc="outside lower center", ncols=columns)
    return figure


def _fill(
    axes: Any, plot: Plot, rows: Sequence[Row], differing: Sequence[str], colors: dict[str, str], xs: Sequence[Any]
) -> None:
    """Draw a line or a group of bars for each value of the differing fields; `colors` is shared by all panels."""
    lines = _lines(plot, rows, plot.y, differing)
    beside = {} if plot.beside is None else _lines(plot, rows, plot.beside, differing)
    first, *others = beside.values() or [None]
    shared = first if others and all(points == first for points in others) else None
    width = 0.8 / max(1, len(lines))
    for i, (name, points) in enumerate(lines.items()):
        color = colors.setdefault(name, KERNEL_COLORS.get(name) or f"C{len(colors)}")
        if plot.kind == "line":
            _draw_line(axes, points, xs, color=color, label=name, marker=KERNEL_MARKERS.get(name, "o"))
            own = {} if shared else beside.get(name, {})
            _draw_line(axes, own, xs, color=color, label=f"{name}, predicted", linestyle="--")
        else:
            places = [xs.index(x) - 0.4 + width * (i + 0.5) for x in points]
            axes.bar(places, list(points.values()), width, color=color, label=name)
    if shared:  # one prediction for all lines: drawn once, because equal lines would hide each other
        _draw_line(axes, shared, xs, color="0.4", label="predicted", linestyle="--")
    texts = [show(x, plot.x) for x in xs]
    ticks = [f"{x:.3g}" if isinstance(x, float) and len(text) > 5 else text for x, text in zip(xs, texts, strict=True)]
    if plot.kind == "bar":
        axes.set_xticks(range(len(xs)), ticks)
        if sum(map(len, ticks)) > 40:
            axes.tick_params("x", rotation=45)
    elif "x" in plot.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, ticks)
        axes.minorticks_off()
    values = [value for points in lines.values() for value in points.values()]
    low, high = min(values, default=1.0), max(values, default=1.0)
    # On a logarithmic axis the length of a bar says nothing, so bars get one only if they would be too small otherwise.
    if "y" in plot.log and (plot.kind == "line" or high > 10 * low > 0):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_label_1_2_5)
        axes.yaxis.set_minor_formatter(_label_1_2_5)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(plot: Plot, rows: Sequence[Row], column: Column, differing: Sequence[str]) -> dict[str, dict[Any, float]]:
    """A column's values by x, for each line by its name."""
    lines: dict[str, dict[Any, float]] = {}
    for row in rows:
        name = " ".join(label(field, row) for field in differing) or row.case
        if (value := column.value(row)) is not None:
            lines.setdefault(name, {})[_x(plot, row)] = value
    return lines


def _draw_line(axes: Any, points: dict[Any, float], xs: Sequence[Any], **style: Any) -> None:
    if None in points:  # does not depend on x
        axes.axhline(points[None], lw=1.4, **{name: value for name, value in style.items() if name != "marker"})
    elif points:
        found = [x for x in xs if x in points]
        style.setdefault("marker", "x" if len(found) == 1 else None)  # a single point would be invisible
        axes.plot(found, [points[x] for x in found], ms=4, lw=1.4, **style)


def _label_1_2_5(value: float, _: Any = None) -> str:
    """A tick label of a logarithmic axis, such as 0.2, if its first digit is 1, 2 or 5."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
