"""The pictures of the write-up, as SVG: the same type, colours and sizes in all of them.

A shape whose id begins with `TOLD` gets the rest of it as its title, which a browser shows under the pointer. Marks may
overlap or be thin, so the shape is an unseen one above all marks of a column, bar or panel, and tells each of them.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..bench.instruments.trace import merge
from ..bench.profiling.timeline import COLORS as MEMORY_COLORS
from ..machine.files import write_whole
from ..report.kernel_profiles import CLASS_COLORS
from ..report.plots import KERNEL_COLORS
from ..report.step_streams import COLORS as STREAM_COLORS
from ..report.step_streams import read_streams, streams_file
from .figures import number

FOLDER = "pictures"
TOLD = "title: "
_UNSEEN: dict[str, Any] = {"alpha": 0, "zorder": 9}
_COLORS = ("#1f4ea8", "#d62728", "#2ca02c", "#ff9f1c", "#9467bd", "#17a6c4", "#8c564b", "#6b6b6b")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "cs336",  # equal pictures get equal files
}
Cell = Callable[[dict[str, Any]], Any]


def styled() -> AbstractContextManager[None]:
    """The style of the write-up, for all that is drawn in this context."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


class Pictures:
    """Draws into a folder. Each method returns the Markdown of its picture, whose file is named after `problem`."""

    def __init__(self, out: Path) -> None:
        self.out, self.problem = out, ""
        self.count: dict[str, int] = {}

    def lines(
        self, rows: Sequence[dict[str, Any]], x: Cell, y: Cell, caption: str,
        by: str = "", xlabel: str = "", ylabel: str = "", log: str = "",
    ) -> str:  # fmt: skip
        """A line for each value of the field `by`."""
        figure, axes = _figure()
        lines: dict[str, list[tuple[Any, Any]]] = {}
        for row in rows:
            lines.setdefault(str(row[by]) if by else "", []).append((x(row), y(row)))
        for i, (name, points) in enumerate(lines.items()):
            color = KERNEL_COLORS.get(name, _COLORS[i % len(_COLORS)])
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", ms=4, lw=1.5, color=color, label=name)
        ticks = sorted({point[0] for points in lines.values() for point in points})
        if "x" in log:
            axes.set_xscale("log", base=2)
            every = 1 + len(ticks) // 9  # names of neighbouring ticks must not touch
            axes.set_xticks(ticks, [f"{tick:,}" if i % every == 0 else "" for i, tick in enumerate(ticks)])
            axes.minorticks_off()
        if "y" in log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        start, end = axes.get_xlim()
        middles = [math.sqrt(a * b) if "x" in log else (a + b) / 2 for a, b in pairwise(ticks)]
        for tick, (low, high) in zip(ticks, pairwise([start, *middles, end]), strict=True):
            values = [(name, number(value)) for name, points in lines.items() for at, value in points if at == tick]
            axes.axvspan(low, high, gid=_told((xlabel, f"{tick:,}"), f"{ylabel}:", *values), **_UNSEEN)
        if len(lines) > 1:
            figure.legend(loc="outside right center")
        return self._save(figure, caption)

    def shares(self, spans: Sequence[tuple[str, dict[str, Any]]], caption: str) -> str:
        """A bar for each span of a kernel profile, divided by class of kernel."""
        bars = [(name, {kind: span["share"].get(kind, 0) for kind in CLASS_COLORS}) for name, span in spans]
        return self.stacks(bars, caption, "share of kernel time (%)", 0.01, CLASS_COLORS)

    def stacks(
        self, bars: Sequence[tuple[str, Mapping[str, float]]], caption: str,
        xlabel: str = "", scale: float = 1, colors: Mapping[str, str] = {},
    ) -> str:  # fmt: skip
        """A horizontal bar for each name, divided into its parts; values are divided by `scale`.

        Parts that are 0 in all bars are left out.
        """
        figure, axes = _figure(0.9 + 0.32 * len(bars))
        left = [0.0] * len(bars)
        names = dict.fromkeys(part for _, values in bars for part in values)
        parts = [part for part in names if any(values.get(part, 0) > 0 for _, values in bars)]
        for i, part in enumerate(parts):
            widths = [max(0.0, values.get(part, 0)) / scale for _, values in bars]
            color = colors.get(part, _COLORS[i % len(_COLORS)])
            axes.barh(range(len(bars)), widths, 0.7, left=left, color=color, label=part.replace("_", " "))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, (name, values) in enumerate(bars):
            sizes = [(part.replace("_", " "), number(max(0.0, values.get(part, 0)) / scale)) for part in parts]
            axes.axhspan(place - 0.35, place + 0.35, gid=_told(name, f"{xlabel}:", *sizes), **_UNSEEN)
        axes.set_xlim(0, max(left))
        _name_lines(axes, range(len(bars)), [name for name, _ in bars], xlabel)
        figure.legend(loc="outside lower center", ncols=5)
        return self._save(figure, caption)

    def streams(self, rows: Sequence[dict[str, Any]], caption: str) -> str:
        """The compute and communication of each row's profiled step on one time axis; "" if no file has them."""
        folders = [(row, row["path"].parent) for row in rows]
        found = [(row["variant"], file) for row, folder in folders if (file := streams_file(row, folder)) is not None]
        if not found:
            return ""
        figure, axes = _figure(0.7 + 0.62 * len(found))
        ticks = []
        for place, (variant, file) in enumerate(found):
            for i, (kind, intervals) in enumerate(read_streams(file).items()):
                # Kernels a few microseconds apart are drawn as one.
                spans = [(a, b - a) for a, b in merge(intervals, gap=0.02)]
                low = 2.5 * place + i - 0.4
                axes.broken_barh(spans, (low, 0.8), color=STREAM_COLORS[kind], linewidth=0)
                told = _told(variant, (kind, f"{number(sum(span for _, span in spans))} ms in all"))
                axes.axhspan(low, low + 0.8, gid=told, **_UNSEEN)
                ticks.append((2.5 * place + i, f"{variant}: {kind}"))
        axes.set_xlim(left=0)
        places, names = zip(*ticks, strict=True)
        _name_lines(axes, places, names, "ms from the first kernel of the step")
        return self._save(figure, caption)

    def timelines(self, panels: Sequence[tuple[str, dict[str, Any]]], caption: str) -> str:
        """Memory in use over a step, by category: a panel for each row of a memory profile, below its title."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.6, 0.7 + 1.7 * len(panels)), layout="constrained")
        drawn: dict[str, Any] = {}
        for axes, (title, row) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            timeline, bottom = row["timeline"], [0.0] * len(row["timeline"]["ms"])
            for name, in_use in timeline["in_use"].items():
                top = [low + size / 2**30 for low, size in zip(bottom, in_use, strict=True)]
                color = MEMORY_COLORS[name]
                drawn[name] = axes.fill_between(timeline["ms"], bottom, top, step="post", color=color, linewidth=0)
                bottom = top
            most = [(name, number(max(in_use) / 2**30)) for name, in_use in timeline["in_use"].items()]
            axes.axhspan(0, max(bottom), gid=_told(title, "at most (GiB):", *most), **_UNSEEN)
            axes.set_ylim(0, 1.15 * max(bottom))
            axes.set_xlim(timeline["ms"][0], timeline["ms"][-1])
            for name, (start, end) in timeline["phases"].items():
                axes.axvline(start, ymax=0.87, color="black", lw=0.8, ls="--")  # the names stand above the lines
                is_narrow = end - start < 0.1 * timeline["ms"][-1]  # its name ends where the phase ends
                at, side = (end, "right") if is_narrow else ((start + end) / 2, "center")
                axes.text(at, 0.98, name, transform=axes.get_xaxis_transform(), ha=side, va="top", fontsize=8)
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_ylabel("in use (GiB)")
        axes.set_xlabel("time on the host (ms)")
        figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=3)
        return self._save(figure, caption)

    def _save(self, figure: Any, caption: str) -> str:
        self.count[self.problem] = self.count.get(self.problem, 0) + 1
        name = f"{FOLDER}/{self.problem}-{self.count[self.problem]}.svg"
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        text = re.sub(f'<g id="{TOLD}(.*?)">', r"<g><title>\1</title>", file.getvalue(), flags=re.S)
        write_whole(self.out / name, text)
        return f"![{caption}]({name})"


def _told(*parts: Any) -> str:
    """The id of a shape that tells its parts, a line for each: a text, or a name with a value."""
    return TOLD + "\n".join(": ".join(part) if isinstance(part, tuple) else str(part) for part in parts if part)


def _name_lines(axes: Any, places: Sequence[float], names: Sequence[str], xlabel: str) -> None:
    """Name the bars of a picture, the first on top."""
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)


def _figure(height: float = 0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, max(height, 2.6)), layout="constrained")  # inches; at least 6 cm on paper
    return figure, figure.subplots()
