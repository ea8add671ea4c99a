"""What the case `attention-sweep` writes: a CSV file, three plots and a report of them, with names of their own."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.row import Row
from ..machine.files import write_figure, write_whole
from .attention import with_speedups
from .plots import KERNEL_COLORS, KERNEL_MARKERS, draw, put_title
from .tables import markdown_table, row_fields
from .view import OUTCOMES, Column, Plot, View, common_facts, csv_text, table

CSV, FORWARD, HEATMAP, SCALING, REPORT = (
    f"attention_sweep_{name}" for name in ("results.csv", "forward.png", "heatmap.png", "scaling.png", "report.md")
)
_TIME = Column("forward (ms)", "forward_ms.p50", ".4g")
_SPEEDUP = Column("times as fast as naive", "forward_speedup")
_SETTING = ("dtype", "is_causal", "batch_size", "num_heads", "head_size", "device")


def derive(rows: Sequence[Row]) -> list[Row]:
    """Rows with their speed-up over plain attention, and the tier as it is written on the command line."""
    named = [replace(row, config={**row.config, "tier": ":".join(map(str, row.config["tier"]))}) for row in rows]
    return with_speedups(named, "forward_ms", "forward_speedup", "kernel", "naive")


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write all into a folder; return the files. CSV and table have all rows, plots those of the last row's setting."""
    drawn = [row for row in rows if _setting(row) == _setting(rows[-1])]
    write_whole(folder / CSV, csv_text(rows, VIEW))
    bars = Plot(name="forward", y=_TIME, x="tier", lines=("kernel",), kind="bar", log="y")
    draw(bars, drawn, folder / FORWARD, _SETTING[:-1])
    draw_heatmap(drawn, folder / HEATMAP)
    draw_scaling(drawn, folder / SCALING)
    write_whole(folder / REPORT, report(rows, drawn))
    return [folder / name for name in (CSV, FORWARD, HEATMAP, SCALING, REPORT)]


def _setting(row: Row) -> list[Any]:
    return [row.config.get(name) for name in _SETTING] + [row.env.get("gpu")]


def _grid(rows: Sequence[Row]) -> tuple[list[str], list[str], dict[tuple[str, str], Row]]:
    """Kernels, tiers, and the row of each pair that has one."""
    cells = {(row.config["kernel"], row.config["tier"]): row for row in rows}
    kernels, tiers = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    return kernels, tiers, cells


def draw_heatmap(rows: Sequence[Row], path: Path) -> None:
    """Kernels over tiers: the median in ms, and in colour and number how many times as fast as plain attention."""
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    kernels, tiers, cells = _grid(rows)
    ratios = {place: ratio for place, row in cells.items() if (ratio := _SPEEDUP.value(row))}
    logs = {place: math.log2(ratio) for place, ratio in ratios.items()}
    low, high = math.floor(min(-1.0, *logs.values(), 0.0)), math.ceil(max(1.0, *logs.values(), 0.0))
    largest = max(-low, high)
    figure = Figure(figsize=(2.4 + 1.0 * len(tiers), 1.6 + 0.7 * len(kernels)), layout="constrained")
    axes = figure.subplots()
    colors = [[logs.get((kernel, tier), math.nan) for tier in tiers] for kernel in kernels]
    image = axes.imshow(colors, cmap="PuOr", norm=Normalize(-largest, largest), aspect="auto")
    for (kernel, tier), row in cells.items():
        place, ratio = (tiers.index(tier), kernels.index(kernel)), ratios.get((kernel, tier))
        lines = [f"{_TIME.value(row) or 0.0:.3g} ms"] if row.status == "ok" else OUTCOMES[row.status].split(maxsplit=2)
        lines += [] if ratio is None else [f"{ratio:.2f}x"]
        log = logs.get((kernel, tier), 0.0)
        is_dark = abs(log) > 0.6 * largest
        color = "white" if is_dark else "black"
        axes.text(*place, "\n".join(lines), ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set_yticks(range(len(kernels)), kernels)
    axes.set_xlabel("tier (queries:keys)")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, label="times as fast as naive")
    bar.ax.set_ylim(low, high)
    ticks = range(low, high + 1)
    bar.set_ticks(list(ticks), labels=[f"{2.0**tick:.3g}" for tick in ticks])
    put_title(figure, f"median of the forward pass; {_facts(rows)}")
    write_figure(figure, path)


def draw_scaling(rows: Sequence[Row], path: Path) -> None:
    """Time over length, both logarithmic: squares as lines; rectangles as hollow marks at sqrt(queries x keys)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths: set[int] = set()
    rectangles = 0
    for kernel in dict.fromkeys(row.config["kernel"] for row in rows):
        points = _points([row for row in rows if row.config["kernel"] == kernel])
        if not points:  # matplotlib has no logarithm of nothing
            continue
        look: dict[str, Any] = {"color": KERNEL_COLORS.get(kernel), "marker": KERNEL_MARKERS.get(kernel, "o"), "ms": 5}
        line = {n_q: ms for (n_q, n_k), ms in points.items() if n_q == n_k}
        others = {math.sqrt(n_q * n_k): ms for (n_q, n_k), ms in points.items() if n_q != n_k}
        axes.plot(sorted(line), [line[n] for n in sorted(line)], lw=1.4, label=kernel, **look)
        axes.plot(list(others), list(others.values()), ls="none", mfc="none", **look)
        lengths, rectangles = lengths | set(line), rectangles + len(others)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if lengths:
        axes.set_xticks(sorted(lengths), map(str, sorted(lengths)))
        axes.minorticks_off()
    axes.set_xlabel("length" + ("; hollow: rectangles, at sqrt(queries x keys)" if rectangles else ""))
    axes.set_ylabel(_TIME.name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_lines():
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    put_title(figure, _facts(rows))
    write_figure(figure, path)


def _points(rows: Sequence[Row]) -> dict[tuple[int, int], float]:
    """Times by queries and keys, for the rows that have one."""
    points = {}
    for row in rows:
        n_q, n_k = map(int, row.config["tier"].split(":"))
        if (ms := _TIME.value(row)) is not None:
            points[n_q, n_k] = ms
    return points


def _facts(rows: Sequence[Row]) -> str:
    return common_facts(rows, _SETTING[:-1])[0].replace("_", " ")


def report(rows: Sequence[Row], drawn: Sequence[Row]) -> str:
    """The document: what was measured, the fastest kernel of each tier, the plots, all rows."""
    kernels, tiers, cells = _grid(drawn)
    lines = []
    for tier in tiers:
        times = {name: ms for name in kernels if (row := cells.get((name, tier))) and (ms := _TIME.value(row))}
        best = min(times, key=lambda name: times[name], default=None)
        if best is not None:
            lines.append([tier, best, f"{times[best]:.4g}", _SPEEDUP.text(row_fields(cells[best, tier]))])
    fastest = markdown_table(["tier", "fastest", _TIME.name, _SPEEDUP.name], lines, left=2)
    pictures = "\n\n".join(f"![{name}]({name})" for name in (FORWARD, HEATMAP, SCALING))
    return (
        "# Attention's forward pass at tiers of queries and keys\n\n"
        "A tier is QUERIES:KEYS. Times are medians; the kernels of a tier took turns. "
        f"In the plots and the first table: {_facts(drawn)}."
        f"\n\n{fastest}\n\n{pictures}\n\n## All rows\n\n{table(rows, VIEW)}\n"
    )


_STATISTICS = tuple(Column(f"{name} (ms)", f"forward_ms.{name}", ".4g") for name in ("p20", "p80", "mean", "std"))
VIEW = View(
    keys=(*_SETTING[:-1], "tier", "kernel"),
    columns=(_TIME, *_STATISTICS, Column("TFLOP/s", "forward_tflops", ".1f"), _SPEEDUP),
    derive=derive,
    write=write,
)
