"""Predictions beside measurements: the memory and time of rows, their errors, and the aims that they meet."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config.model import ModelConfig
from .accounting import matmul_parameters
from .cards import CARDS, Card
from .communication import collective_seconds
from .comparison import AIMS, HELD_BEFORE_BACKWARD, PEAK, PEAKS, Comparison, Pair, error, verdict_lines
from .job import Job
from .measured_memory import NO_STEPS, measured_memory
from .memory import WORKSPACE
from .rows import Measured, card_of, is_forward, is_of_cpu, job_of, positive
from .step import step_seconds
from .working import GIB

_UNKNOWN = "an unknown card"
_HEADER = ("row", "measured GiB", "predicted", "error", "measured ms", "predicted", "error", "")


def compare(row: Measured) -> Comparison:
    """A row's measured and predicted numbers, or a note with the reason why there are none."""
    name = _name(row)
    try:
        return _compare(name, row)
    except KeyError as found:
        reason = f"the row has no {found}"
    except ValueError as found:
        reason = str(found)
    except (TypeError, AttributeError, ArithmeticError, MemoryError) as found:  # rows may come from anywhere
        reason = f"the row has an impossible value: {found}"
    return Comparison(name=name, note=reason)


def _name(row: Measured) -> str:
    """The case, the fields that distinguish its rows, and the variant. No word is repeated."""
    config = row.config
    fields = [str(config.get(field, "")) for field in ("size", "context_length", "attention", "bytes")]
    case, last = row.case, ""
    if case == "all-reduce":  # its rows measure other collectives too
        case = str(config.get("collective", case))
    elif case == "attention":
        fields = ["x".join(str(config[field]) for field in ("length", "head_size") if field in config)]
    elif case == "profile-memory":  # its variant is the mode
        last = str(config.get("precision", ""))
    return " ".join(dict.fromkeys(" ".join((case, *fields, row.variant, last)).split()))


def _compare(name: str, row: Measured) -> Comparison:
    if row.status != "ok":
        raise ValueError(f"status {row.status}")
    card = card_of(row)
    if row.case == "all-reduce":
        return _compare_collective(name, row, card)
    job = None if row.case in NO_STEPS or is_forward(row) else job_of(row)
    if is_of_cpu(row):  # its peak includes the whole process, and it has no rates of a card
        raise ValueError("no prediction for a CPU")
    memory_of, memory = measured_memory(row)
    if job is None:
        note = "no prediction for its time" if "step_ms" in row.metrics else ""
        if memory_of == HELD_BEFORE_BACKWARD and memory is not None and memory[0] - memory[1] == 2 * WORKSPACE:
            note = "64 MiB of the measured memory are cuBLAS's workspaces"  # in the first row of a process
        return Comparison(name=name, is_step=False, memory_of=memory_of, memory=memory, note=note)
    step = row.metrics.get("step_ms", {})
    milliseconds = step.get("p50", step.get("mean"))
    found = Comparison(name=name, recorded=job.cuda_graph, memory_of=memory_of, memory=memory)
    if card is None:
        return replace(found, note=_UNKNOWN)
    if milliseconds is None:
        return found
    return replace(
        found,
        is_large_alone=_is_large_alone(job, card),
        slowed_by=" and ".join((row.env.get("gpu_after") or {}).get("slowed_by") or ()),
        seconds=(positive("step_ms", milliseconds) / 1e3, step_seconds(job, card)),
    )


def _is_large_alone(job: Job, card: Card) -> bool:
    """Whether the blocks have at least as many weights as in size large, on one H200; the vocabulary does not count."""
    large = ModelConfig(size="large").shape
    sizes = [matmul_parameters(replace(shape, vocab_size=0)) for shape in (job.shape, large)]
    return job.world_size == 1 and card == CARDS["H200"] and sizes[0] >= sizes[1]


def _compare_collective(name: str, row: Measured, card: Card | None) -> Comparison:
    if row.config["backend"] != "nccl":
        raise ValueError(f"no prediction for {row.config['backend']}")
    if card is None:
        raise ValueError(_UNKNOWN)
    kind, nbytes, world_size = (row.config[field] for field in ("collective", "bytes", "world_size"))
    if kind == "broadcast":
        raise ValueError("no prediction for a broadcast")
    measured = positive("time_ms", row.metrics["time_ms"]["p50"]) / 1e3
    return Comparison(name=name, is_step=False, seconds=(measured, collective_seconds(kind, nbytes, world_size, card)))


def check_text(found: Sequence[Comparison]) -> str:
    """All rows by file with measurement, prediction and error; below them the mean errors and the aims."""
    compared = [each for each in found if each.memory or each.seconds]
    lines = [_HEADER, *(_cells(each) for each in compared)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    table, file = [], ""
    for each, line in zip([None, *compared], lines, strict=True):
        if each is not None and each.file != file:
            file = each.file
            table.append(f"{file}:")
        cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 7)), line[7]]
        table.append("  ".join(cells).rstrip())

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
            "aims": {aim.name: aim.met(each) for aim in AIMS},
        }
        for each in found
    ]
