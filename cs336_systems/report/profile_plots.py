"""Pictures of profiles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.profiling.kernel_classes import CLASSES
from ..bench.row import Row
from .pictures import save_picture
from .profile_tables import setting

# Okabe and Ito's colours, which differ in lightness too: for print, and for eyes that do not tell red from green.
CLASS_COLORS = {
    "matmul": "#0072B2",
    "attention": "#56B4E9",
    "softmax": "#D55E00",
    "reduction": "#E69F00",
    "elementwise": "#F0E442",
    "copy": "#009E73",
    "communication": "#CC79A7",
    "optimizer": "#4D4D4D",
    "other": "#BBBBBB",
}
_SMALLEST_LABEL = 0.05


def plot_shares(rows: Sequence[Row], out: Path) -> None:
    """Draw the shares of kernel classes into a PNG: a bar for inference and for each phase of the other modes."""
    from matplotlib.figure import Figure

    bars = [(name, span) for row in rows if row.status == "ok" for name, span in row.metrics["spans"].items()]
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(bars)), layout="constrained")
    axis = figure.subplots()
    shown = [cls for cls in CLASSES if any(span["share"].get(cls) for _, span in bars)]
    left = [0.0] * len(bars)
    for cls in shown:
        widths = [span["share"].get(cls, 0.0) for _, span in bars]
        drawn = axis.barh(
            range(len(bars)), widths, left=left, color=CLASS_COLORS[cls], label=cls, edgecolor="white", height=0.72
        )
        labels = [f"{width:.0%}" if width >= _SMALLEST_LABEL else "" for width in widths]
        dark = cls in ("matmul", "softmax", "copy", "optimizer")
        axis.bar_label(drawn, labels, label_type="center", color="white" if dark else "black", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(bars)), [f"{name}\n{span['kernel_ms']:,.3g} ms" for name, span in bars])
    axis.invert_yaxis()
    _finish(axis, rows)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(shown), frameon=False)
    save_picture(figure, out)


def _finish(axis: Any, rows: Sequence[Row]) -> None:
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axis.set_xlabel("share of kernel time in a step")
    axis.set_title(setting(rows[0]), loc="left", fontsize=11)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
