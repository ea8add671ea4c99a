"""Memory by part and moment of `optimizer-sharding` and `fsdp-accounting`: tables, picture and view."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from ..bench.instruments.memory_moments import AFTER, BEFORE, INITIALISED, MOMENTS, PARTS
from ..bench.profiling.phases import ACTIVATIONS, GRADIENTS, OPTIMIZER, OTHER, PARAMETERS, TEMPORARIES
from ..bench.profiling.timeline import COLORS
from ..bench.row import Row
from ..planner.activations import counted_activations
from ..planner.memory import part_bytes
from ..planner.rows import is_of_cpu, training_job, workload_job
from .fields import get
from .pictures import save_picture
from .plots import put_title, stack_bars
from .selection import common_facts, grouped, label, latest
from .spec import Column, View
from .strategy_tables import SETTING
from .tables import table

KEYS = (*SETTING, "variant")
_COLORS = dict(
    zip(PARTS, (COLORS[c] for c in (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, TEMPORARIES, OTHER)), strict=True)
)


def memory_parts_table(rows: Sequence[Row]) -> str:
    """Memory by part and moment, peaks and savings over the first variant, and the gathers that end too late."""
    shown = with_savings(rows)
    done = [row for row in shown if row.status == "ok"]
    texts = [
        "Of the process with most memory. Peak: since the previous moment. Predicted: the largest size of each part, "
        "and the peak of all together.",
        table([moment for row in done for moment in _moments(row)], _MOMENTS),
    ]
    texts = [*(texts if done else []), table(shown, VIEW)]
    for row in done:
        if "gathers" in row.metrics:
            gathers = [replace(row, config={**row.config, **each}, metrics=each) for each in row.metrics["gathers"]]
            late = [gather for gather in gathers if gather.metrics["slack_ms"] < 0]
            middle = median(gather.metrics["slack_ms"] for gather in gathers) if gathers else 0
            in_time = f"{len(gathers) - len(late)} of {len(gathers)} all-gathers of a step"
            texts.append(
                f"{row.variant}: {in_time} end before their weights are needed; half of all end {middle:.3f} ms "
                "before, or earlier. Those that end later stall the step for "
                f"{row.metrics['stall_ms']:.3f} ms; turn 2 is the backward pass."
            )
            texts += [table(late, _GATHERS)] if late else []
    return "\n\n".join(texts)


def with_savings(rows: Sequence[Row]) -> list[Row]:
    """The latest rows, with today's prediction, its error, and savings over the first variant of the same setting."""
    found = []
    for group in grouped(predicted_today(latest(rows, KEYS)), SETTING):
        first_peak, first_predicted = (get(group[0], f"metrics.{name}", None) for name in _PEAKS)
        for row in group:
            peak, predicted = (get(row, f"metrics.{name}", None) for name in _PEAKS)
            more = {}
            if peak is not None and predicted is not None:
                more["error"] = predicted / peak - 1
            if row is not group[0] and None not in (peak, first_peak):
                more["saved_bytes"] = first_peak - peak
            if row is not group[0] and None not in (predicted, first_predicted):
                more["predicted_saved_bytes"] = first_predicted - predicted
            found.append(replace(row, metrics={**row.metrics, **more}))
    return found


def _moments(row: Row) -> list[Row]:
    """A row for each moment, and one for the prediction if there is any."""
    found = {
        name: {"live": moment["live_bytes"], "peak": moment["peak_bytes"], **moment["parts"]}
        for name, moment in row.metrics["moments"].items()
    }
    found |= {"predicted": row.metrics["predicted"]} if row.metrics.get("predicted") else {}
    return [replace(row, config={**row.config, "moment": name}, metrics=sizes) for name, sizes in found.items()]


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


def draw_parts(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the memory of each row at each moment, by part, and the peak since the moment before, into a PNG."""
    from matplotlib.figure import Figure

    done = [row for row in rows if row.status == "ok"]
    if not done:
        return []
    moments = [row.metrics["moments"][name] for row in done for name in MOMENTS]
    facts, differing = common_facts(done, KEYS)
    names = [" ".join(label(name, row) for name in differing) or row.variant for row in done]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(moments)), layout="constrained")
    axis = figure.subplots()
    stack_bars(axis, [{part: moment["parts"][part] / 2**30 for part in PARTS} for moment in moments], _COLORS)
    peaks = [moment["peak_bytes"] / 2**30 for moment in moments]
    axis.plot(peaks, range(len(moments)), "k|", ms=12, mew=1.5, label="peak since the moment before")
    axis.set_yticks(range(len(moments)), [f"{name}: {moment}" for name in names for moment in MOMENTS], fontsize=8)
    axis.set_xlabel("memory in use (GiB)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    put_title(figure, facts.replace("_", " "))
    return [save_picture(figure, folder / f"{done[0].case}-parts.png")]


def _gib(name: str, metric: str) -> Column:
    return Column(f"{name} (GiB)", metric, ".4g", 2**30)


_PEAKS = ("peak_memory_bytes", "predicted.peak")
VIEW = View(
    keys=KEYS,
    columns=(
        Column("step (ms)", "step_ms.p50"),
        _gib("peak", _PEAKS[0]),
        _gib("predicted", _PEAKS[1]),
        Column("error", "error", "+.1%"),
        _gib("saved", "saved_bytes"),
        _gib("predicted saving", "predicted_saved_bytes"),
        _gib("peak of initialisation", f"moments.{INITIALISED}.peak_bytes"),
        _gib("before the step", f"moments.{BEFORE}.live_bytes"),
        _gib("after the step", f"moments.{AFTER}.live_bytes"),
        Column("stall of gathers (ms)", "stall_ms", ".3f"),
    ),
    derive=with_savings,
    more=draw_parts,
)
_MOMENTS = View(
    keys=(*KEYS, "moment"),
    columns=(_gib("live", "live"), _gib("peak", "peak"), *(_gib(part.replace("_", " "), part) for part in PARTS)),
)
_GATHERS = View(
    keys=(*KEYS, "unit", "turn"),
    columns=(
        Column("gather (ms)", "ms", ".3f"),
        Column("slack (ms)", "slack_ms", "+.3f"),
        Column("stall (ms)", "stall_ms", ".3f"),
    ),
)
