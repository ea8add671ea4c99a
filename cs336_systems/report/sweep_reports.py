"""The reports of `attention-sweep` and `lm-matrix`: a CSV file, three plots and a document each."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.row import Row
from ..machine.files import write_figure, write_whole
from .attention_tables import with_speedups
from .markdown import markdown_table
from .plots import KERNEL_COLORS, KERNEL_MARKERS, draw, put_title
from .selection import OUTCOMES, common_facts, grouped
from .spec import Column, Plot, View
from .tables import csv_text, table


def _document(title: str, about: str, results: Sequence[str], pictures: Sequence[str], all_rows: str) -> str:
    shown = "\n\n".join(f"![{name}]({name})" for name in pictures)
    return "\n\n".join([f"# {title}", about, *results, shown, "## All rows", all_rows]) + "\n"


_FORWARD = Column("forward (ms)", "forward_ms.p50", ".4g")
_SPEEDUP = Column("times as fast as naive", "forward_speedup")
_SWEEP_KEYS = ("dtype", "is_causal", "batch_size", "num_heads", "head_size")
_FORWARD_PNG, _HEATMAP_PNG, _SCALING_PNG = (f"attention_sweep_{name}.png" for name in ("forward", "heatmap", "scaling"))


def attention_sweep_speedups(rows: Sequence[Row]) -> list[Row]:
    """Rows with their speed-up over naive attention, and the tier as on the command line: QUERIES:KEYS."""
    named = [replace(row, config={**row.config, "tier": ":".join(map(str, row.config["tier"]))}) for row in rows]
    return with_speedups(named, "forward_ms", "forward_speedup", "kernel", "naive")


def write_attention_sweep(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the report of `attention-sweep`; return the files. Plots have only the rows with the last row's setting."""

    def setting(row: Row) -> list[Any]:
        return [row.config.get(name) for name in (*_SWEEP_KEYS, "device")] + [row.env.get("gpu")]

    drawn = [row for row in rows if setting(row) == setting(rows[-1])]
    facts = common_facts(drawn, _SWEEP_KEYS)[0].replace("_", " ")
    bars = Plot(name="forward", y=_FORWARD, x="tier", lines=("kernel",), kind="bar", log="y")
    draw(bars, drawn, folder / _FORWARD_PNG, _SWEEP_KEYS)
    draw_heatmap(drawn, folder / _HEATMAP_PNG, f"median of the forward pass; {facts}")
    _draw_scaling(drawn, folder / _SCALING_PNG, facts)
    fastest = []
    for tier in dict.fromkeys(row.config["tier"] for row in drawn):
        times = {row.config["kernel"]: row for row in drawn if row.config["tier"] == tier and _FORWARD.value(row)}
        if times:
            best = min(times.values(), key=lambda row: _FORWARD.value(row) or math.inf)
            fastest.append([tier, best.config["kernel"], _FORWARD.text(best), _SPEEDUP.text(best)])
    document = _document(
        "Attention's forward pass at tiers of queries and keys",
        "A tier is QUERIES:KEYS. Times are medians; the kernels of a tier took turns. "
        f"In the plots and the first table: {facts}.",
        [markdown_table(["tier", "fastest", _FORWARD.name, _SPEEDUP.name], fastest, left=2)],
        [_FORWARD_PNG, _HEATMAP_PNG, _SCALING_PNG],
        table(rows, ATTENTION_SWEEP),
    )
    csv = write_whole(folder / "attention_sweep_results.csv", csv_text(rows, ATTENTION_SWEEP))
    pictures = [folder / name for name in (_FORWARD_PNG, _HEATMAP_PNG, _SCALING_PNG)]
    return [csv, *pictures, write_whole(folder / "attention_sweep_report.md", document)]


def draw_heatmap(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw kernels over tiers: the median in ms, and the speed-up over naive attention as colour and number."""
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    cells = {(row.config["kernel"], row.config["tier"]): row for row in rows}
    kernels, tiers = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    ratios = {place: ratio for place, row in cells.items() if (ratio := _SPEEDUP.value(row))}
    logs = {place: math.log2(ratio) for place, ratio in ratios.items()}
    low, high = math.floor(min(-1.0, *logs.values(), 0.0)), math.ceil(max(1.0, *logs.values(), 0.0))
    largest = max(-low, high)
    figure = Figure(figsize=(2.4 + 1.0 * len(tiers), 1.6 + 0.7 * len(kernels)), layout="constrained")
    axes = figure.subplots()
    colors = [[logs.get((kernel, tier), math.nan) for tier in tiers] for kernel in kernels]
    image = axes.imshow(colors, cmap="PuOr", norm=Normalize(-largest, largest), aspect="auto")
    for place, row in cells.items():
        lines = [f"{_FORWARD.value(row) or 0.0:.3g} ms"] if row.status == "ok" else OUTCOMES[row.status].split(" ", 2)
        lines += [f"{ratios[place]:.2f}x"] if place in ratios else []
        x, y = tiers.index(place[1]), kernels.index(place[0])
        color = "white" if abs(logs.get(place, 0.0)) > 0.6 * largest else "black"  # white on dark cells
        axes.text(x, y, "\n".join(lines), ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set_yticks(range(len(kernels)), kernels)
    axes.set_xlabel("tier (queries:keys)")
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, label="times as fast as naive")
    bar.ax.set_ylim(low, high)
    ticks = list(range(low, high + 1))
    bar.set_ticks(ticks, labels=[f"{2.0**tick:.3g}" for tick in ticks])
    put_title(figure, title)
    write_figure(figure, path)


def _draw_scaling(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw time over length, both logarithmic: a line for squares, hollow marks at sqrt(queries x keys) for others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths: set[int] = set()
    has_rectangles = False
    for kernel in dict.fromkeys(row.config["kernel"] for row in rows):
        squares, rectangles = {}, {}
        for row in rows:
            if row.config["kernel"] == kernel and (ms := _FORWARD.value(row)) is not None:
                n_q, n_k = map(int, row.config["tier"].split(":"))
                if n_q == n_k:
                    squares[n_q] = ms
                else:
                    rectangles[math.sqrt(n_q * n_k)] = ms
        if not squares and not rectangles:  # matplotlib cannot scale empty logarithmic axes
            continue
        look: dict[str, Any] = {"color": KERNEL_COLORS.get(kernel), "marker": KERNEL_MARKERS.get(kernel, "o"), "ms": 5}
        axes.plot(sorted(squares), [squares[n] for n in sorted(squares)], lw=1.4, label=kernel, **look)
        axes.plot(list(rectangles), list(rectangles.values()), ls="none", mfc="none", **look)
        lengths, has_rectangles = lengths | set(squares), has_rectangles or bool(rectangles)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if lengths:
        axes.set_xticks(sorted(lengths), map(str, sorted(lengths)))
        axes.minorticks_off()
    axes.set_xlabel("length" + ("; hollow: rectangles, at sqrt(queries x keys)" if has_rectangles else ""))
    axes.set_ylabel(_FORWARD.name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_lines():
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    put_title(figure, title)
    write_figure(figure, path)


ATTENTION_SWEEP = View(
    keys=(*_SWEEP_KEYS, "tier", "kernel"),
    columns=(
        _FORWARD,
        *(Column(f"{name} (ms)", f"forward_ms.{name}", ".4g") for name in ("p20", "p80", "mean", "std")),
        Column("TFLOP/s", "forward_tflops", ".1f"),
        _SPEEDUP,
    ),
    derive=attention_sweep_speedups,
    write=write_attention_sweep,
)


_LOSS = Column("final loss", "final_loss", ".5f")
_DIFFERENCE = Column("differs by", "loss_difference", ".1e")
_EPOCH = Column("an epoch (s)", "epoch_s", ".4g")
_THROUGHPUT = Column("tokens/s", "tokens_per_s", ",.0f")
_MEMORY = Column("peak memory of a process (GiB)", "peak_memory_bytes", ".3g", 2**30)
LM_MATRIX_THROUGHPUT = "lm_matrix_throughput.png"
_LM_MATRIX_PLOTS = {"lm_matrix_time.png": _EPOCH, "lm_matrix_memory.png": _MEMORY, LM_MATRIX_THROUGHPUT: _THROUGHPUT}
_MATRIX_KEYS = ("size", "d_model", "num_layers", "vocab_size", "context_length", "batch_size", "precision", "compile",
                "devices", "train_path", "epochs", "max_steps", "lr", "seed", "device")  # fmt: skip


def write_lm_matrix(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the report of `lm-matrix`; return the files. Plots have only the rows with the last row's setting."""
    drawn = next(group for group in grouped(rows, _MATRIX_KEYS) if rows[-1] in group)
    for name, column in _LM_MATRIX_PLOTS.items():
        plot = Plot(name=name, y=column, x="kernel", lines=("strategy",), kind="bar")
        draw(plot, [row for row in drawn if row.status == "ok"], folder / name, _MATRIX_KEYS)
    flat = [replace(row, config={k: v for k, v in row.config.items() if k != "run"}) for row in rows]
    csv = write_whole(folder / "lm_matrix_results.csv", csv_text(flat, LM_MATRIX))
    document = write_whole(folder / "lm_matrix_report.md", lm_matrix_report(rows, drawn))
    return [csv, *(folder / name for name in _LM_MATRIX_PLOTS), document]


def lm_matrix_report(rows: Sequence[Row], drawn: Sequence[Row]) -> str:
    """The document: whether the losses agree, the fastest strategy of each kernel, the plots of `drawn`, all rows."""
    done = [row for row in drawn if row.status == "ok"]
    fastest = []
    for kernel in dict.fromkeys(row.config["kernel"] for row in done):
        own = [row for row in done if row.config["kernel"] == kernel]
        best = max(own, key=lambda row: _THROUGHPUT.value(row) or 0.0)
        if _THROUGHPUT.value(best):
            fastest.append([kernel, best.config["strategy"], _THROUGHPUT.text(best), _LOSS.text(best)])
    largest = max((_DIFFERENCE.value(row) or 0.0 for row in done), default=0.0)
    verdict = f"The final losses of a kernel's strategies are equal to within {largest:.1e} nats a token."
    differing = [row for row in drawn if row.status == "error" and _DIFFERENCE.value(row) is not None]
    if differing:
        verdict = "**Final losses differ:** " + "; ".join(f"{row.variant}: {row.error}" for row in differing) + "."
    return _document(
        "Training runs: attention kernels x parallel strategies",
        "Each is a run of the training loop; all see the same batches, which the processes of a strategy share, and "
        "end with a validation. `none` is one process. The time of an epoch is the mean of all steps, the first ones "
        "too, times their number; throughput is of the median step. "
        f"In the plots and the first table: {common_facts(drawn, _MATRIX_KEYS)[0]}.",
        [verdict, markdown_table(["kernel", "fastest strategy", _THROUGHPUT.name, _LOSS.name], fastest, left=2)],
        list(_LM_MATRIX_PLOTS),
        table(rows, LM_MATRIX),
    )


LM_MATRIX = View(
    keys=(*_MATRIX_KEYS, "val_path", "kernel", "strategy"),
    columns=(
        _LOSS,
        _DIFFERENCE,
        Column("first gradient norms differ by", "norm_difference", ".1e"),
        Column("last training loss", "train_loss", ".5f"),
        Column("steps", "steps", ".0f"),
        _EPOCH,
        Column("step (ms)", "step_ms.p50"),
        _THROUGHPUT,
        _MEMORY,
        Column("start-up (s)", "startup_s", ".1f"),
    ),
    write=write_lm_matrix,
)
