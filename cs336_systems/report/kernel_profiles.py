"""Rows of `profile-kernels`: the shares of a step's time in tables and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bench.profiling.annotated_attention import SCORES, SOFTMAX, VALUES
from ..bench.profiling.kernel_totals import CLASSES
from ..bench.row import Row
from ..config.model import DEFAULT_VOCAB_SIZE
from .markdown import markdown_table
from .pictures import save_picture
from .selection import OUTCOMES, latest

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
    """For each configuration: times, shares of kernel classes, the longest kernel of each span, attention's parts."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(setting(row), []).append(row)
    texts = []
    for name, group in groups.items():
        group = latest(group, ())
        texts.append(f"{name}:")
        texts += [f"{row.variant}: {OUTCOMES[row.status]}" for row in group if row.status != "ok"]
        measured = [row for row in group if row.status == "ok"]
        if measured:
            texts += [_times(measured), _shares(measured), _longest(measured)]
            if any(row.metrics["attention"] for row in measured):
                texts.append(_attention(measured))
    return "\n\n".join(texts)


def setting(row: Row) -> str:
    """The configuration of a row without its mode: "xl, 4 x 512, fp32, attention naive, NVIDIA H200"."""
    config = row.config
    on = row.env.get("gpu") if config.get("device") != "cpu" else "CPU"
    parts = [
        config["size"],
        f"{config['batch_size']} x {config['context_length']}",
        config["precision"],
        f"attention {config['attention']}",
        "compiled" if config.get("compile") else "",
        f"vocabulary {config.get('vocab_size')}" if config.get("vocab_size") not in (None, DEFAULT_VOCAB_SIZE) else "",
        f"optimizer {config.get('optimizer')}" if config.get("optimizer") not in (None, "torch_fused") else "",
        f"checkpointing {checkpointing}" if (checkpointing := config.get("activation_checkpointing")) != "none" else "",
        on or config.get("device"),
        "nsys" if config.get("tool") == "nsys" else "",
    ]
    return ", ".join(str(part) for part in parts if part)


def _ms(value: Any) -> str:
    return "n/a" if value is None else f"{value:.3g}" if value < 100 else f"{value:.1f}"


def _times(rows: Sequence[Row]) -> str:
    header = "mode,step (ms),the same profiled (ms),kernels together (ms),at least one running (ms),steps"
    names = ("wall_ms", "profiled_wall_ms", "kernel_ms", "busy_ms")
    lines = []
    for row in rows:
        lines.append((row.variant, *(_ms(row.metrics[name]) for name in names), str(row.config["steps"])))
    return markdown_table(header.split(","), lines)


def _shares(rows: Sequence[Row]) -> str:
    """A column for each span, with the shares of kernel classes, the kernel time, and the time by the host's clock."""
    columns = []
    for row in rows:
        phases = row.metrics["phase_wall_ms"]
        whole = {"inference": phases.get("forward"), "training step": sum(phases.values())}
        whole["forward + backward"] = phases.get("forward", 0.0) + phases.get("backward", 0.0)
        for name, span in row.metrics["spans"].items():
            columns.append((name, span, phases.get(name, whole.get(name))))
    shown = [cls for cls in CLASSES if any(span["share"].get(cls) for _, span, _ in columns)]
    lines = [(cls, *(f"{span['share'].get(cls, 0.0):.1%}" for _, span, _ in columns)) for cls in shown]
    lines.append(("kernel time (ms)", *(_ms(span["kernel_ms"]) for _, span, _ in columns)))
    lines.append(("time by the clock (ms)", *(_ms(clock) for _, _, clock in columns)))
    return "Shares of kernel time:\n\n" + markdown_table(["class", *(name for name, _, _ in columns)], lines)


def _longest(rows: Sequence[Row]) -> str:
    spans = [each for row in rows for each in row.metrics["spans"].items()]
    lines = [(name, *_kernel_cells(span["top"][0])) for name, span in spans if span["top"]]
    header = ["in", "class", "calls a step", "ms a step", "share", "kernel with the most time"]
    return markdown_table(header, lines)


def _kernel_cells(kernel: dict[str, Any]) -> tuple[str, ...]:
    numbers = f"{kernel['calls']:g}", _ms(kernel["ms"]), f"{kernel['share']:.1%}"
    return kernel["class"], *numbers, f"`{short_name(kernel['kernel'])}`"


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
            lines = [(str(i + 1), *_kernel_cells(kernel)) for i, kernel in enumerate(span["top"])]
            tables.append(f"{name}: {_ms(span['kernel_ms'])} ms of kernels a step\n\n" + markdown_table(header, lines))
    return "\n\n".join(tables)


def attention_part_ms(row: Row, phase: str, part: str, products: bool | None) -> float:
    """Time in a range of attention: of its matrix products (True), of everything else (False), or of both (None)."""
    of_class = row.metrics["attention"].get(part, {}).get(phase, {})
    return sum(ms for cls, ms in of_class.items() if products is None or (cls == "matmul") is products)


def _attention(rows: Sequence[Row]) -> str:
    """Time and operations of attention's parts, with matrix products apart from the kernels around them."""
    operations = rows[0].metrics["attention_operations"]
    columns = [
        (row, phase)
        for row in rows
        for phase in row.metrics["phase_wall_ms"]
        if any(phase in of_phase for of_phase in row.metrics["attention"].values())
    ]
    lines = []
    for label, part, products in _ATTENTION_PARTS:
        counted = "-" if products is False else f"{operations[part] / 1e9:.3g}"
        lines.append((label, counted, *(_ms(attention_part_ms(row, phase, part, products)) for row, phase in columns)))
    heads = [
        "inference" if row.variant == "forward" else f"{phase}, {row.variant.replace('_', ' ')}"
        for row, phase in columns
    ]
    table = markdown_table(["attention", "GFLOP forward", *(f"{head} (ms)" for head in heads)], lines)
    of_products = attention_part_ms(*columns[0], SCORES, True) + attention_part_ms(*columns[0], VALUES, True)
    if not of_products:
        return table
    ratio = attention_part_ms(*columns[0], SOFTMAX, None) / of_products
    work = operations[SOFTMAX] / (operations[SCORES] + operations[VALUES])
    told = f"softmax takes {ratio:.2f} of the time of the two products, for {work:.3f} of their operations"
    return f"{table}\n\nIn {heads[0]}, {told}."


def plot_shares(rows: Sequence[Row], out: Path) -> None:
    """Draw the shares of kernel classes into a PNG, with a bar for each span of each row."""
    from matplotlib.figure import Figure

    bars = [(name, span) for row in rows if row.status == "ok" for name, span in row.metrics["spans"].items()]
    figure = Figure(figsize=(9, 1.6 + 0.55 * len(bars)), layout="constrained")
    axis = figure.subplots()
    shown = [cls for cls in CLASSES if any(span["share"].get(cls) for _, span in bars)]
    left = [0.0] * len(bars)
    for cls in shown:
        widths = [span["share"].get(cls, 0.0) for _, span in bars]
        style: dict[str, Any] = {"color": CLASS_COLORS[cls], "label": cls, "edgecolor": "white", "height": 0.72}
        drawn = axis.barh(range(len(bars)), widths, left=left, **style)
        labels = [f"{width:.0%}" if width >= 0.05 else "" for width in widths]  # narrower bars have no room for one
        is_dark = cls in ("matmul", "softmax", "copy", "optimizer")
        axis.bar_label(drawn, labels, label_type="center", color="white" if is_dark else "black", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(bars)), [f"{name}\n{span['kernel_ms']:,.3g} ms" for name, span in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axis.set_xlabel("share of kernel time in a step")
    axis.set_title(setting(rows[0]), loc="left", fontsize=11)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(shown), frameon=False)
    save_picture(figure, out)
