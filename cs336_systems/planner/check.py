"""Predictions beside measurements: the memory and time of rows, their errors, and the aims that they meet."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cs336_basics.shape import ModelShape

from ..config.checks import require
from ..config.model import ModelConfig
from .accounting import matmul_parameters, naive_attention_bytes
from .activations import block_parts, counted_activations
from .cards import CARDS
from .communication import collective_seconds
from .forward_memory import forward_peak_bytes
from .job import Job
from .memory import WORKSPACE, peak_bytes
from .rows import UNUSABLE, Measured, card_of, is_forward, is_of_cpu, job_of, reason, workload_job
from .step import step_seconds
from .working import GIB, in_columns

PEAK = "peak"
PEAK_OF_ACTIVATIONS = "peak beyond weights and gradients"
SAVED_BY_BLOCK = "saved for backward by a block"
HELD_BEFORE_BACKWARD = "held before backward"
PEAKS = (PEAK, PEAK_OF_ACTIVATIONS)
AIMS = {
    "memory": ("peak memory within 5 %", 0.05),
    "time": ("step time within 15 %, large and above on one H200", 0.15),
}
"""Each aim in words, and its largest acceptable error."""
Pair = tuple[float, float]
"""Measured and predicted."""
_UNKNOWN = "an unknown card"
_HEADER = ("row", "measured GiB", "predicted", "error", "measured ms", "predicted", "error", "")
_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row's memory in bytes and time in s, measured and predicted; None for a number without a pair."""

    name: str
    file: str = ""
    """The row's file, if there are several."""
    recorded: bool = False
    """Whether the step was recorded as a CUDA graph, so that it is not host-bound."""
    is_step: bool = True
    """Whether the row measures a training step, not a part of one or a collective."""
    is_large_alone: bool = False
    """Whether the model is of size large or above, on one H200."""
    slowed_by: str = ""
    """Why the GPU's clock was lowered at the end of the measurement."""
    memory_of: str = PEAK
    """The memory that is compared: one of PEAKS, or memory kept for the backward pass."""
    memory: Pair | None = None
    seconds: Pair | None = None
    note: str = ""


def error(pair: Pair | None) -> float | None:
    """Predicted / measured - 1."""
    return None if pair is None else pair[1] / pair[0] - 1


def aimed_at(each: Comparison) -> dict[str, float]:
    """A row's errors by the aims that apply to it."""
    errors = {
        "memory": error(each.memory) if each.memory_of in PEAKS else None,
        "time": error(each.seconds) if each.is_step and each.is_large_alone else None,
    }
    return {aim: off for aim, off in errors.items() if off is not None and math.isfinite(off)}


def met_by(each: Comparison) -> dict[str, bool]:
    """Whether a row meets the aims that apply to it."""
    return {aim: abs(off) <= AIMS[aim][1] for aim, off in aimed_at(each).items()}


def compare(row: Measured) -> Comparison:
    """A row's measured and predicted numbers, or a note with the reason why there are none."""
    config = row.config
    fields, last = [str(config.get(field, "")) for field in ("size", "context_length", "attention", "bytes")], ""
    case = row.case
    if case == "all-reduce":  # its rows measure other collectives too
        case = str(config.get("collective", case))
    elif case == "attention":
        fields = ["x".join(str(config[field]) for field in ("length", "head_size") if field in config)]
    elif case == "profile-memory":  # its variant is the mode
        last = str(config.get("precision", ""))
    name = " ".join(dict.fromkeys(" ".join((case, *fields, row.variant, last)).split()))  # no word twice
    try:
        if row.status != "ok":
            raise ValueError(f"status {row.status}")
        return _compare_collective(name, row) if row.case == "all-reduce" else _compare(name, row)
    except UNUSABLE as found:
        return Comparison(name=name, note=reason(found))


def _compare(name: str, row: Measured) -> Comparison:
    job = None if row.case in ("residuals", "attention") or is_forward(row) else job_of(row)
    if is_of_cpu(row):  # its peak includes the whole process, and it has no rates of a card
        raise ValueError("no prediction for a CPU")
    memory_of, memory = _memory(row)
    if job is None:
        note = "no prediction for its time" if "step_ms" in row.metrics else ""
        if memory_of == HELD_BEFORE_BACKWARD and memory is not None and memory[0] - memory[1] == 2 * WORKSPACE:
            note = "64 MiB of the measured memory are cuBLAS's workspaces"  # in the first row of a process
        return Comparison(name=name, is_step=False, memory_of=memory_of, memory=memory, note=note)
    found = Comparison(name=name, recorded=job.cuda_graph, memory_of=memory_of, memory=memory)
    step, card = row.metrics.get("step_ms", {}), card_of(row)
    milliseconds = step.get("p50", step.get("mean"))
    if card is None:
        return replace(found, note=_UNKNOWN)
    if milliseconds is None:
        return found
    if job.why_no_time:
        return replace(found, note=f"no time: {job.why_no_time}")
    large = ModelConfig(size="large").shape
    in_blocks, in_large = (matmul_parameters(replace(shape, vocab_size=0)) for shape in (job.shape, large))
    return replace(
        found,
        is_large_alone=job.world_size == 1 and card == CARDS["H200"] and in_blocks >= in_large,
        slowed_by=" and ".join((row.env.get("gpu_after") or {}).get("slowed_by") or ()),
        seconds=_pair("step_ms", milliseconds, step_seconds(job, card), 1e3),
    )


def _compare_collective(name: str, row: Measured) -> Comparison:
    card, kind, backend = card_of(row), row.config["collective"], row.config["backend"]
    if backend != "nccl":
        raise ValueError(f"no prediction for {backend}")
    if card is None:
        raise ValueError(_UNKNOWN)
    if kind == "broadcast":
        raise ValueError("no prediction for a broadcast")
    predicted = collective_seconds(kind, row.config["bytes"], row.config["world_size"], card)
    seconds = _pair("time_ms", row.metrics["time_ms"]["p50"], predicted, 1e3)
    return Comparison(name=name, is_step=False, seconds=seconds)


def _pair(name: str, measured: Any, predicted: float, unit: float = 1) -> Pair:
    """A metric, divided by its unit, beside its prediction. Raises ValueError if it is not a number above 0."""
    require(0 < float(measured) < math.inf, name, measured, "a number above 0")
    return float(measured) / unit, float(predicted)


def _memory(row: Measured) -> tuple[str, Pair | None]:
    """The kind of memory that a row measures, and its bytes by measurement and prediction, if there are any."""
    config, metrics = row.config, row.metrics
    if row.case == "residuals":  # the input and the activations of a block, without copies of weights, seen by hooks
        sizes = {name: config[name] for name in ("context_length", "d_model", "d_ff", "num_heads")}
        same = {name: config[name] for name in ("batch_size", "precision", "attention", "compile")}
        job = Job(shape=ModelShape(**sizes, vocab_size=1, num_layers=1), **same)
        require(metrics["saved_bytes"] > 0, "saved_bytes", metrics["saved_bytes"], "a number above 0")
        measured = metrics["saved_bytes"] + metrics["input_bytes"]
        return SAVED_BY_BLOCK, _pair("saved_bytes", measured, sum(block_parts(job).values()))
    if row.case == "attention":
        # Naive attention, eager or compiled, holds S + M + 6 x 4 B N D bytes: the saved tensors of
        # `naive_attention_bytes`, of which k and v are inputs, plus q, o and the gradient of o.
        kernel, dtype = config.get("kernel"), config.get("dtype")
        if kernel != "naive" or dtype != "fp32":
            raise ValueError(f"no prediction for the case attention with kernel {kernel} in {dtype}")
        batch, length, head_size = (config[name] for name in ("batch_size", "length", "head_size"))
        counted = naive_attention_bytes(batch, length, length, head_size, config["is_causal"])
        predicted = counted["saved_for_backward"] + 3 * 4 * batch * length * head_size
        name = "memory_before_backward_bytes"
        return HELD_BEFORE_BACKWARD, _pair(name, metrics[name], predicted)
    if row.case == "checkpointing":  # the peak of forward and backward beyond weights and gradients
        _, predicted = counted_activations(workload_job(config), on_gpu=not is_of_cpu(row))
        return PEAK_OF_ACTIVATIONS, _pair("peak_bytes", metrics["peak_bytes"], predicted)
    job = workload_job(config) if is_forward(row) else job_of(row)
    peak = metrics.get("peak_memory_bytes")
    if row.case == "profile-memory":  # its peak_bytes counts requested bytes, this one allocated bytes
        peak = metrics["allocator"]["peak_allocated_bytes"]
    if peak is None:
        return PEAK, None
    return PEAK, _pair("peak_memory_bytes", peak, forward_peak_bytes(job) if is_forward(row) else peak_bytes(job))


def check_text(found: Sequence[Comparison]) -> str:
    """All rows by file with measurement, prediction and error; below them the mean errors and the aims."""
    compared = [each for each in found if each.memory or each.seconds]
    header, *lines = in_columns([_HEADER, *map(_cells, compared)], left=(0, len(_HEADER) - 1))
    table, file = [header], ""
    for each, line in zip(compared, lines, strict=True):
        if each.file != file:
            file = each.file
            table.append(f"{file}:")
        table.append(line)

    def summary(label: str, pairs: Sequence[Pair | None]) -> str:
        known = [abs(e) for pair in pairs if (e := error(pair)) is not None and math.isfinite(e)]
        errors = f"mean {sum(known) / len(known):.1%}, max {max(known):.1%} of {len(known)} rows" if known else ""
        return f"{label:<35} {errors or 'nothing to compare'}"

    steps = [each for each in found if each.is_step]
    transfers = [each.seconds for each in found if not each.is_step and each.seconds]
    kept = [each.memory for each in found if each.memory_of not in PEAKS]
    left_out = Counter(each.note for each in found if each not in compared)
    return "\n".join([
        *table,
        *(f"not compared, {count} rows: {note}" for note, count in left_out.items()),
        "",
        summary("peak memory:", [each.memory for each in found if each.memory_of in PEAKS]),
        *([summary("memory kept for backward:", kept)] if kept else []),
        summary("step time, recorded as CUDA graphs:", [each.seconds for each in steps if each.recorded]),
        summary("step time, all:", [each.seconds for each in steps]),
        *([summary("collectives:", transfers)] if transfers else []),
        "The predicted time is the GPU's. Without a CUDA graph (*) the host may take longer to launch the kernels.",
        "",
        *verdict_lines(found),
    ])  # fmt: skip


def _cells(each: Comparison) -> tuple[str, ...]:
    def pair(values: Pair | None, unit: float, digits: int) -> tuple[str, str, str]:
        if values is None:
            return "-", "-", "-"
        return f"{values[0] / unit:.{digits}f}", f"{values[1] / unit:.{digits}f}", f"{error(values):+.1%}"

    digits = 2 if each.memory_of == PEAK else 4  # a block or attention may keep only a few MiB
    star = "*" if each.is_step and not each.recorded and each.seconds is not None else ""
    mark = ", ".join(filter(None, (each.note or star, "" if each.memory_of == PEAK else each.memory_of)))
    times = pair(each.seconds, 1e-3, 1 if each.is_step else 3)
    return (each.name, *pair(each.memory, GIB, digits), *times, mark)


def verdict_lines(found: Sequence[Comparison]) -> list[str]:
    """For each aim the number of rows that meet it, and below it the rows that miss it: the 10 largest errors first."""
    lines = []
    for aim, (text, within) in AIMS.items():
        known = [(each, errors[aim]) for each in found if aim in (errors := aimed_at(each))]
        missed = sorted((one for one in known if abs(one[1]) > within), key=lambda one: -abs(one[1]))
        recorded = [abs(off) <= within for each, off in known if each.recorded]
        verdict = f"{len(known) - len(missed)} of {len(known)} rows" if known else "no row that it applies to"
        if aim == "time" and recorded:
            verdict += f" ({sum(recorded)} of the {len(recorded)} recorded as CUDA graphs)"
        lines.append(f"aim: {text}: {verdict}")
        for each, off in missed[:_SHOWN]:
            why = []
            if aim == "time" and off < 0:
                why += [] if each.recorded else ["the host may set the pace"]
                why += [f"the GPU's clock was lowered by {each.slowed_by}"] if each.slowed_by else []
            where = f" in {each.file}" if each.file else ""
            lines.append(f"  {off:+.1%}  {each.name}{where}{': ' if why else ''}{', and '.join(why)}")
        if len(missed) > _SHOWN:
            lines.append(f"  and {len(missed) - _SHOWN} more")
    return lines


def check_json(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The same as plain JSON types; `aims` says for each aim whether the row meets it, null if it does not apply."""

    def pair(values: Pair | None) -> dict[str, float | None] | None:
        return values and {"measured": values[0], "predicted": values[1], "error": error(values)}

    return [
        {
            "row": each.name,
            "file": each.file,
            "recorded": each.recorded,
            "note": each.note,
            "memory_bytes": pair(each.memory),
            "step_s": pair(each.seconds),
            "memory_of": each.memory_of,
            "slowed_by": each.slowed_by,
            "aims": dict.fromkeys(AIMS) | met_by(each),
        }
        for each in found
    ]
