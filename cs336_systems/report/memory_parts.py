"""Memory by part and moment of `optimizer-sharding` and `fsdp-accounting`: tables, picture and view."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.instruments.memory_moments import AFTER, BEFORE, FORWARD, INITIALISED, MOMENTS, PARTS
from ..bench.profiling.phases import ACTIVATIONS, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARIES
from ..bench.profiling.timeline_plot import COLORS
from ..bench.row import Row
from ..planner.activations import counted_activations
from ..planner.memory import part_bytes
from ..planner.rows import is_of_cpu, training_job, workload_job
from .markdown import markdown_table
from .pictures import save_picture
from .plots import put_title
from .selection import OUTCOMES, common_facts, grouped, label, latest
from .spec import Column, View
from .strategy_tables import SETTING

_KEYS = (*SETTING, "variant")
_COLORS = dict(
    zip(PARTS, (COLORS[c] for c in (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER)), strict=True)
)


def memory_parts_table(rows: Sequence[Row]) -> str:
    """For each machine and setting: memory by part and moment, savings over the first variant, and all gathers."""
    return "\n\n".join(_setting_tables(group) for group in grouped(latest(rows, _KEYS), SETTING))


def predicted_today(rows: Sequence[Row]) -> list[Row]:
    """The rows with the prediction of today's planner in place of the one from when they were measured."""
    found = []
    for row in rows:
        metrics = dict(row.metrics)
        if "predicted_bytes" in metrics:  # a row of `checkpointing`
            held, peak = counted_activations(workload_job(row.config), on_gpu=not is_of_cpu(row))
            metrics |= {"predicted_held_bytes": held, "predicted_bytes": peak}
        elif stored := metrics.get("predicted"):
            parts = part_bytes(training_job(row.case, row.variant, row.config))
            metrics["predicted"] = {name: parts[name] for name in stored}
        found.append(replace(row, metrics=metrics))
    return found


def _setting_tables(rows: Sequence[Row]) -> str:
    done = [row for row in rows if row.status == "ok"]
    unit, size = _unit(max((row.metrics["peak_memory_bytes"] for row in done), default=0))
    parts = [
        f"{common_facts(rows, SETTING)[0]}; {unit} of the process with most memory; peak: since the previous moment; "
        "predicted: the largest size of each part, and the peak of all together:",
        _moments_table(done, size),
        _savings_table(rows, unit, size),
    ]
    for row in done:
        if "gathers" in row.metrics:
            in_time, counted = row.metrics["gathers_in_time"], row.metrics["gathers_counted"]
            late = "other one stalls" if counted - in_time == 1 else "others stall"
            parts.append(
                f"{row.variant}: {in_time} of {counted} all-gathers of a step end before their weights are needed; "
                f"the {late} it for {row.metrics['stall_ms']:.3f} ms. {_gathers_table(row.metrics['gathers'])}"
            )
    failures = [f"- {row.variant} {OUTCOMES[row.status]}: {row.error}" for row in rows if row.status != "ok"]
    return "\n\n".join([*parts, *(["\n".join(failures)] if failures else [])])


def _unit(most: float) -> tuple[str, int]:
    """The unit, and its number of bytes, in which the largest of some sizes reads best."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((each for each in units if most >= each[1]), units[-1])


def _number(nbytes: float | None, size: int) -> str:
    return "-" if nbytes is None else f"{nbytes / size:.2f}" if nbytes else "0"


def _moments_table(rows: Sequence[Row], size: int) -> str:
    """A line for each variant and moment, and one for its predicted parts if there are any."""
    lines = []
    for row in rows:
        for name in MOMENTS:
            moment = row.metrics["moments"][name]
            numbers = (moment["live_bytes"], moment["peak_bytes"], *(moment["parts"][part] for part in PARTS))
            lines.append([row.variant, name, *(_number(value, size) for value in numbers)])
        if predicted := row.metrics.get("predicted"):
            parts = (_number(predicted.get(part), size) for part in PARTS)
            lines.append([row.variant, "predicted", "-", _number(predicted.get("peak"), size), *parts])
    header = ["variant", "moment", "live", "peak", *(part.replace("_", " ") for part in PARTS)]
    return markdown_table(header, lines, left=2)


def _savings_table(rows: Sequence[Row], unit: str, size: int) -> str:
    """A line for each variant: step, measured and predicted peak, and both savings over the first variant."""

    def peaks(row: Row) -> tuple[float, float | None]:
        return row.metrics["peak_memory_bytes"], row.metrics.get("predicted", {}).get("peak")

    first = rows[0]
    lines = []
    for row in rows:
        if row.status != "ok":
            lines.append([row.variant, OUTCOMES[row.status], *"-----"])
            continue
        peak, predicted = peaks(row)
        error = "-" if predicted is None else f"{predicted / peak - 1:+.1%}"
        saved, predicted_saved = "-", "-"
        if row is not first and first.status == "ok":
            first_peak, first_predicted = peaks(first)
            saved = _number(first_peak - peak, size)
            if first_predicted is not None and predicted is not None:
                predicted_saved = _number(first_predicted - predicted, size)
        step = f"{row.metrics['step_ms']['p50']:.1f}"
        lines.append([row.variant, step, _number(peak, size), _number(predicted, size), error, saved, predicted_saved])
    over = f"saved over {first.variant} ({unit})"
    header = ["variant", "step (ms)", f"peak ({unit})", "predicted", "error", over, "predicted saving"]
    return markdown_table(header, lines)


def _gathers_table(gathers: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [each["unit"], str(each["turn"]), f"{each['ms']:.3f}", f"{each['slack_ms']:+.3f}", f"{each['stall_ms']:.3f}"]
        for each in gathers
    ]
    table = markdown_table(["unit", "turn", "gather (ms)", "slack (ms)", "stall (ms)"], lines)
    return f"In the order of their use; turn 2 is the backward pass:\n\n{table}"


def draw_parts(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the memory of each row at each moment, by part, and the peak since the moment before, into a PNG."""
    from matplotlib.figure import Figure

    done = [row for row in rows if row.status == "ok"]
    if not done:
        return []
    moments = [row.metrics["moments"][name] for row in done for name in MOMENTS]
    unit, size = _unit(max(moment["peak_bytes"] for moment in moments))
    facts, differing = common_facts(done, _KEYS)
    names = [" ".join(label(name, row) for name in differing) or row.variant for row in done]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(moments)), layout="constrained")
    axis, left = figure.subplots(), [0.0] * len(moments)
    for part in PARTS:
        widths = [max(0, moment["parts"][part]) / size for moment in moments]
        if any(widths):
            axis.barh(range(len(moments)), widths, left=left, color=_COLORS[part], label=part.replace("_", " "))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    peaks = [moment["peak_bytes"] / size for moment in moments]
    axis.plot(peaks, range(len(moments)), "k|", ms=12, mew=1.5, label="peak since the moment before")
    axis.set_yticks(range(len(moments)), [f"{name}: {moment}" for name in names for moment in MOMENTS], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel(f"memory in use ({unit})")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    put_title(figure, facts.replace("_", " "))
    return [save_picture(figure, folder / f"{done[0].case}-parts.png")]


def _at(moment: str, metric: str, name: str) -> Column:
    return Column(name, f"moments.{moment}.{metric}", ".4g", 2**30)


VIEW = View(
    keys=_KEYS,
    columns=(
        Column("step (ms)", "step_ms.p50"),
        Column("peak (GiB)", "peak_memory_bytes", ".4g", 2**30),
        Column("predicted (GiB)", "predicted.peak", ".4g", 2**30),
        _at(INITIALISED, "peak_bytes", "peak of initialisation (GiB)"),
        _at(BEFORE, "live_bytes", "before the step (GiB)"),
        _at(AFTER, "live_bytes", "after the step (GiB)"),
        _at(FORWARD, "parts.activations", "activations (GiB)"),
        *(_at(AFTER, f"parts.{part}", f"{part.replace('_', ' ')} (GiB)") for part in PARTS[:3]),
        Column("stall of gathers (ms)", "stall_ms", ".3f"),
    ),
    more=draw_parts,
)
