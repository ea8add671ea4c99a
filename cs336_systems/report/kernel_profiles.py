"""Rows of `profile-kernels`: the shares of a step's time in tables and as a picture."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.profiling.kernel_totals import CLASSES
from ..bench.profiling.kernel_trace import SCORES, SOFTMAX, VALUES
from ..bench.row import Row
from .markdown import markdown_table
from .pictures import save_picture
from .plots import put_title, stack_bars
from .selection import common_facts, latest
from .spec import Column, View
from .tables import table

_ATTENTION_PARTS = (  # label, range, matrix products: only them (True), without them (False), with them (None)
    ("scores: Q K^T", SCORES, True),
    ("scores: scaling, mask, casts", SCORES, False),
    ("softmax", SOFTMAX, None),
    ("values: P V", VALUES, True),
    ("values: casts", VALUES, False),
)
# Colours of Okabe and Ito. They differ in lightness too: for print and for colour-blind readers.
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


def kernels_table(rows: Sequence[Row]) -> str:
    """Times of a step, shares of kernel classes in its spans, and attention's parts."""
    shown = latest(rows, KEYS)
    done = [row for row in shown if row.status == "ok"]
    spans, parts = ([part for row in done for part in split(row)] for split in (_spans, _attention_parts))
    tables = [table(shown, VIEW)]
    tables += [f"Shares of kernel time:\n\n{table(spans, _SPANS)}"] if spans else []
    tables += [f"Parts of attention:\n\n{table(parts, _PARTS)}"] if parts else []
    return "\n\n".join(tables)


def _spans(row: Row) -> list[Row]:
    """A row for each span of a step: kernel time, time by the host's clock, and the shares of kernel classes."""
    clock = row.metrics["phase_wall_ms"]
    passes = clock.get("forward", 0.0) + clock.get("backward", 0.0)
    clock = {"inference": passes, "forward + backward": passes, "training step": sum(clock.values()), **clock}
    spans = []
    for name, span in row.metrics["spans"].items():
        share = {kind: share for kind, share in span["share"].items() if share}  # classes without any get no column
        metrics = {**span, "clock_ms": clock.get(name), "share": share}
        spans.append(replace(row, config={**row.config, "in": name}, metrics=metrics))
    return spans


def _attention_parts(row: Row) -> list[Row]:
    """A row for each phase and part of attention, with matrix products apart from the kernels around them."""
    parts, found = row.metrics["attention"], []
    for phase in row.metrics["phase_wall_ms"]:
        for label, part, products in _ATTENTION_PARTS if any(phase in of for of in parts.values()) else ():
            of_class = parts.get(part, {}).get(phase, {})
            ms = sum(ms for cls, ms in of_class.items() if products is None or (cls == "matmul") is products)
            operations = {} if products is False else {"operations": row.metrics["attention_operations"][part]}
            config = {**row.config, "in": phase, "attention part": label}
            found.append(replace(row, config=config, metrics={"ms": ms, **operations}))
    return found


def short_name(kernel: str) -> str:
    """A kernel's name without common prefixes, cut at 90 letters because its beginning tells kernels apart."""
    for noise in ("void ", "at::native::", "(anonymous namespace)::", "at_cuda_detail::"):
        kernel = kernel.replace(noise, "")
    return kernel if len(kernel) <= 90 else kernel[:87] + "..."


def top_kernels_tables(row: Row) -> str:
    """The kernels with the most time in each phase of a profile, and in all phases together."""
    header = ["#", "class", "calls a step", "ms a step", "share", "kernel"]
    tables = []
    for name, span in row.metrics["spans"].items():
        if name != "forward + backward" or row.variant == "forward_backward":
            lines = []
            for i, kernel in enumerate(span["top"], start=1):
                numbers = f"{kernel['calls']:g}", f"{kernel['ms']:.4g}", f"{kernel['share']:.1%}"
                lines.append((str(i), kernel["class"], *numbers, f"`{short_name(kernel['kernel'])}`"))
            tables.append(f"{name}: {span['kernel_ms']:.4g} ms of kernels a step\n\n" + markdown_table(header, lines))
    return "\n\n".join(tables)


KEYS = ("size", "vocab_size", "context_length", "batch_size", "precision", "compile", "attention", "optimizer",
        "activation_checkpointing", "tool", "mode")  # fmt: skip
VIEW = View(
    keys=KEYS,
    columns=(
        Column("step (ms)", "wall_ms", ".4g"),
        Column("the same profiled (ms)", "profiled_wall_ms", ".4g"),
        Column("kernels together (ms)", "kernel_ms", ".4g"),
        Column("at least one running (ms)", "busy_ms", ".4g"),
    ),
)
_SPANS = View(
    keys=(*KEYS, "in"),
    columns=(
        Column("kernels (ms)", "kernel_ms", ".4g"),
        Column("by the clock (ms)", "clock_ms", ".4g"),
        *(Column(name, f"share.{name}", ".1%") for name in CLASSES),
    ),
)
_PARTS = View(
    keys=(*KEYS, "in", "attention part"),
    columns=(Column("GFLOP forward", "operations", ".3g", 10**9), Column("time (ms)", "ms", ".4g")),
)


def plot_shares(rows: Sequence[Row], out: Path) -> None:
    """Draw the shares of kernel classes into a PNG, with a bar for each span of each row."""
    from matplotlib.figure import Figure

    bars = [(name, span) for row in rows if row.status == "ok" for name, span in row.metrics["spans"].items()]
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(bars)), layout="constrained")
    axis = figure.subplots()
    shares = [{cls: span["share"].get(cls, 0.0) for cls in CLASSES} for _, span in bars]
    stack_bars(axis, shares, CLASS_COLORS, edgecolor="white", height=0.72)
    containers: list[Any] = axis.containers
    for drawn in containers:
        widths = [bar.get_width() for bar in drawn]
        labels = [f"{width:.0%}" if width >= 0.05 else "" for width in widths]  # narrower bars have no room for one
        is_dark = drawn.get_label() in ("matmul", "softmax", "copy", "optimizer")
        axis.bar_label(drawn, labels, label_type="center", color="white" if is_dark else "black", fontsize=9)
    axis.set_yticks(range(len(bars)), [f"{name}\n{span['kernel_ms']:,.3g} ms" for name, span in bars])
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axis.set_xlabel("share of kernel time in a step")
    put_title(figure, common_facts(rows, KEYS)[0].replace("_", " "))
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(containers), frameon=False)
    save_picture(figure, out)
