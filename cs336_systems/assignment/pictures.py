"""The pictures of the write-up, as SVG: the same type, colours and sizes in all of them.

A shape whose id begins with `TOLD` gets the rest of it as its title, which a browser shows under the pointer. Marks may
overlap or be thin, so the shape is an unseen one above all marks of a column, bar or panel, and tells each of them.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

from ..bench.profiling.timeline import Timeline, fill_memory, mark_phases
from ..machine.files import write_whole
from ..report.kernel_profiles import CLASS_COLORS
from ..report.plots import KERNEL_COLORS, stack_bars
from ..report.step_streams import streams_figure, streams_file
from .figures import number

FOLDER = "pictures"
TOLD = "title: "
_UNSEEN: dict[str, Any] = {"alpha": 0, "zorder": 9}
_WIDTH, _LEAST_HEIGHT = 6.6, 2.6  # inches; a picture has at least 6 cm on paper
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
        figure = _figure()
        axes = figure.subplots()
        lines: dict[str, list[tuple[Any, Any]]] = {}
        for row in rows:
            lines.setdefault(str(row[by]) if by else "", []).append((x(row), y(row)))
        for (name, points), color in zip(lines.items(), cycle(_COLORS), strict=False):
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", ms=4, lw=1.5, color=KERNEL_COLORS.get(name, color), label=name)
        ticks = sorted({point[0] for points in lines.values() for point in points})
        if "x" in log:
            every = 1 + len(ticks) // 9  # names of neighbouring ticks must not touch
            axes.set_xscale("log", base=2)
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
            told = [(name, value) for name, points in lines.items() for at, value in points if at == tick]
            axes.axvspan(low, high, gid=_told(f"{xlabel}: {tick:,}\n{ylabel}:", told), **_UNSEEN)
        axes.set_xlim(start, end)
        if len(lines) > 1:
            figure.legend(loc="outside right center")
        return self._save(figure, caption)

    def shares(self, spans: Sequence[tuple[str, dict[str, Any]]], caption: str) -> str:
        """A bar for each span of a kernel profile, divided by class of kernel."""
        bars = [(name, {kind: span["share"].get(kind, 0) for kind in CLASS_COLORS}) for name, span in spans]
        return self.stacks(bars, caption, "share of kernel time (%)", 0.01, CLASS_COLORS)

    def stacks(
        self, bars: Sequence[tuple[str, Mapping[str, float]]], caption: str,
        xlabel: str = "", scale: float = 1, colors: Mapping[str, str] | None = None,
    ) -> str:  # fmt: skip
        """A horizontal bar for each name, divided into its parts; values are divided by `scale`."""
        figure = _figure(0.9 + 0.32 * len(bars))
        axes = figure.subplots()
        values = [{part: value / scale for part, value in parts.items()} for _, parts in bars]
        parts = dict.fromkeys(part for bar in values for part in bar)
        stack_bars(axes, values, colors or dict(zip(parts, cycle(_COLORS), strict=False)), height=0.7)
        shown = [part for part in parts if any(bar.get(part, 0) > 0 for bar in values)]
        for place, ((name, _), bar) in enumerate(zip(bars, values, strict=True)):
            told = [(part.replace("_", " "), max(0.0, bar.get(part, 0))) for part in shown]
            axes.axhspan(place - 0.35, place + 0.35, gid=_told(f"{name}\n{xlabel}:", told), **_UNSEEN)
        axes.margins(x=0)
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(xlabel)
        figure.legend(loc="outside lower center", ncols=5)
        return self._save(figure, caption)

    def streams(self, rows: Sequence[dict[str, Any]], caption: str) -> str:
        """The compute and communication of each row's profiled step on one time axis; "" if no file has them."""
        folders = [(row, row["path"].parent) for row in rows]
        found = [(row["variant"], file) for row, folder in folders if (file := streams_file(row, folder)) is not None]
        if not found:
            return ""
        figure = streams_figure(found)
        figure.set_size_inches(_WIDTH, max(_LEAST_HEIGHT, 0.6 + 0.9 * len(found)))
        return self._save(figure, caption)

    def timelines(self, panels: Sequence[tuple[str, dict[str, Any]]], caption: str) -> str:
        """Memory in use over a step, by category: a panel for each row of a memory profile, below its title."""
        figure = _figure(0.7 + 1.7 * len(panels))
        areas: dict[str, Any] = {}
        for axes, (title, row) in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
            timeline = Timeline(**row["timeline"])
            areas |= fill_memory(axes, timeline, 2**30)
            axes.set_ylim(0, 1.15 * timeline.total.max() / 2**30)
            mark_phases(axes, timeline)
            most = [(name, max(in_use) / 2**30) for name, in_use in timeline.in_use.items()]
            axes.axhspan(0, timeline.total.max() / 2**30, gid=_told(f"{title}\nat most (GiB):", most), **_UNSEEN)
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_ylabel("in use (GiB)")
        axes.set_xlabel("time on the host (ms)")
        figure.legend(areas.values(), areas, loc="outside lower center", ncols=3)
        return self._save(figure, caption)

    def _save(self, figure: Any, caption: str) -> str:
        self.count[self.problem] = self.count.get(self.problem, 0) + 1
        name = f"{FOLDER}/{self.problem}-{self.count[self.problem]}.svg"
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        text = re.sub(f'<g id="{TOLD}(.*?)">', r"<g><title>\1</title>", file.getvalue(), flags=re.S)
        write_whole(self.out / name, text)
        return f"![{caption}]({name})"


def _told(head: str, values: Sequence[tuple[str, float]]) -> str:
    """The id of a shape that tells a head, and then each value, by its name if there are several."""
    return "\n".join((TOLD + head, *(f"{name}: {number(value)}" if name else number(value) for name, value in values)))


def _figure(height: float = 0) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(_WIDTH, max(height, _LEAST_HEIGHT)), layout="constrained")
