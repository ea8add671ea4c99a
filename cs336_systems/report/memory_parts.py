"""The tables of `optimizer-sharding` and `fsdp-accounting`: the parts of memory at each moment, and what is saved."""

import statistics
from collections.abc import Callable, Mapping, Sequence
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
from .pictures import save_picture
from .plots import put_title
from .tables import markdown_table, row_fields
from .view import OUTCOMES, Column, View, common_facts, grouped, label, latest, machine

_SETTING = ("devices", "size", "context_length", "batch_size", "precision", "compile")
_KEYS = (*_SETTING, "variant")
_COLORS = dict(
    zip(PARTS, (COLORS[c] for c in (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER)), strict=True)
)
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_parts_table(rows: Sequence[Row]) -> str:
    """For each machine and setting: memory by part and moment, savings over the first variant, and all gathers."""
    return "\n\n".join(_setting_tables(group, _gathers_table) for group in grouped(latest(rows, _KEYS), _SETTING))


def memory_parts_in_short(rows: Sequence[Row]) -> str:
    """The same with one line for the gathers of each direction, instead of one for each gather."""
    return "\n\n".join(_setting_tables(group, _gathers_in_short) for group in grouped(latest(rows, _KEYS), _SETTING))


def predicted_today(rows: Sequence[Row]) -> list[Row]:
    """The rows with what today's planner predicts for them, not the planner of when they were measured."""
    return [_predicted_today(row) for row in rows]


def _predicted_today(row: Row) -> Row:
    if "predicted_bytes" in row.metrics:  # of the case checkpointing
        held, peak = counted_activations(workload_job(row.config), on_gpu=not is_of_cpu(row))
        return replace(row, metrics={**row.metrics, "predicted_held_bytes": held, "predicted_bytes": peak})
    stored = row.metrics.get("predicted")
    if not stored:
        return row
    parts = part_bytes(training_job(row.case, row.variant, row.config))
    return replace(row, metrics={**row.metrics, "predicted": {name: parts[name] for name in stored}})


def _setting_tables(rows: Sequence[Row], gathers_table: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    done = [row for row in rows if row.status == "ok"]
    peak = max((row.metrics["peak_memory_bytes"] for row in done), default=0)
    unit, size = _unit(peak)
    facts = row_fields(rows[0])
    head = (
        f"{facts.get('config.devices')} x {machine(rows[0])}, {facts.get('config.size')}, "
        f"{facts.get('config.batch_size')} x {facts.get('config.context_length')} a process, "
        f"{facts.get('config.precision')}, {'compiled' if facts.get('config.compile') else 'eager'}; "
    )
    tables = [
        f"{head}{unit} a process, of the one that has most; each peak is that since the moment before; "
        "predicted: each part at its largest, beside the peak of all:"
    ]
    tables += [_parts_table(done, size), _savings_table(rows, unit, size)]
    gathers = [_gathers_text(row, gathers_table) for row in done if "gathers" in row.metrics]
    failures = [f"- {row.variant} {OUTCOMES[row.status]}: {row.error}" for row in rows if row.status != "ok"]
    return "\n\n".join([*tables, *gathers, *(["\n".join(failures)] if failures else [])])


def _parts_table(rows: Sequence[Row], size: int) -> str:
    """A line per variant and moment, and one with the predicted parts, if there are any."""
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
    """A line per variant: its step, its measured and predicted peak, and what it saves compared with the first one."""
    first = rows[0]
    lines = []
    for row in rows:
        if row.status != "ok":
            lines.append([row.variant, OUTCOMES[row.status], *"-----"])
            continue
        step, peak, predicted = _times_and_peaks(row)
        saved = ["-", "-"]
        if row is not first and first.status == "ok":
            _, its_peak, its_predicted = _times_and_peaks(first)
            saved = [_number(_less(its_peak, peak), size), _number(_less(its_predicted, predicted), size)]
        error = "-" if predicted is None else f"{predicted / peak - 1:+.1%}"
        lines.append([row.variant, f"{step:.1f}", _number(peak, size), _number(predicted, size), error, *saved])
    beside = f"saved beside {first.variant} ({unit})"
    header = ["variant", "step (ms)", f"peak ({unit})", "predicted", "error", beside, "predicted to be saved"]
    return markdown_table(header, lines)


def _times_and_peaks(row: Row) -> tuple[float, float, float | None]:
    """Median step in ms, peak in bytes, and the predicted peak, if there is one."""
    metrics = row.metrics
    return metrics["step_ms"]["p50"], metrics["peak_memory_bytes"], metrics.get("predicted", {}).get("peak")


def _unit(most: float) -> tuple[str, int]:
    """The unit, and its bytes, in which the largest of some numbers reads best."""
    return next((each for each in _UNITS if most >= each[1]), _UNITS[-1])


def _number(nbytes: float | None, size: int) -> str:
    return "-" if nbytes is None else f"{nbytes / size:.2f}" if nbytes else "0"


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _gathers_text(row: Row, table: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
    """How many gathers are over in time, and a table of them."""
    metrics = row.metrics
    late = metrics["gathers_counted"] - metrics["gathers_in_time"]
    who = "the other one holds it up for" if late == 1 else "the others hold it up for"
    return (
        f"{row.variant}: {metrics['gathers_in_time']} of {metrics['gathers_counted']} all-gathers of a step are over "
        f"before their weights could be used; {who} {metrics['stall_ms']:.3f} ms. {table(metrics['gathers'])}"
    )


def _gathers_table(gathers: Sequence[Mapping[str, Any]]) -> str:
    """A line per gather."""
    lines = [
        [each["unit"], str(each["turn"]), f"{each['ms']:.3f}", f"{each['slack_ms']:+.3f}", f"{each['stall_ms']:.3f}"]
        for each in gathers
    ]
    table = markdown_table(["unit", "turn", "gather (ms)", "slack (ms)", "stall (ms)"], lines)
    return f"In the order in which they are needed, turn 2 in the backward pass:\n\n{table}"


def _gathers_in_short(gathers: Sequence[Mapping[str, Any]]) -> str:
    """A line per direction: the first gather of a unit is for the forward pass."""
    lines = []
    for name, is_forward in (("forward", True), ("backward", False)):
        own = [each for each in gathers if (each["turn"] == 1) is is_forward]
        if own:
            ms, least = [each["ms"] for each in own], min(own, key=lambda each: each["slack_ms"])
            late = f"{sum(each['slack_ms'] < 0 for each in own)}"
            stall = f"{sum(each['stall_ms'] for each in own):.3f}"
            lines.append([name, str(len(own)), f"{min(ms):.3f}", f"{statistics.median(ms):.3f}", f"{max(ms):.3f}",
                          f"{least['slack_ms']:+.3f}", least["unit"], late, stall])  # fmt: skip
    header = ["pass", "gathers", "shortest (ms)", "median (ms)", "longest (ms)", "least slack (ms)", "of", "late",
              "stall (ms)"]  # fmt: skip
    return (
        f"Slack is the time between a gather's end and the first use of its weights:\n\n{markdown_table(header, lines)}"
    )


def draw_parts(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the memory at each moment of each row, by part, with the peak since the moment before, into a PNG."""
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


def _at(moment: str, what: str, name: str) -> Column:
    return Column(name, f"moments.{moment}.{what}", ".4g", 2**30)


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
