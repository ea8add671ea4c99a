"""Predictions beside what was measured: memory and time of rows, and how far off they are."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .cards import Card
from .communication import collective_seconds
from .memory import peak_bytes
from .rows import Measured, card_of, is_of_cpu, job_of, positive
from .step import step_seconds
from .working import GIB

_UNKNOWN = "an unknown card"
_HEADER = ("row", "measured GiB", "predicted", "error", "measured ms", "predicted", "error", "")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row's peak memory in bytes and step time in s, measured and predicted; None for what is not."""

    name: str
    file: str = ""
    """Where the row is from, where there are several files."""
    recorded: bool = False
    """Whether the step was recorded as a CUDA graph, so that the host does not set its pace."""
    is_step: bool = True
    """Whether the time is that of a training step, and not of one collective."""
    memory: tuple[float, float] | None = None
    seconds: tuple[float, float] | None = None
    note: str = ""


def error(pair: tuple[float, float] | None) -> float | None:
    """Predicted / measured - 1."""
    return None if pair is None else pair[1] / pair[0] - 1


def compare(row: Measured) -> Comparison:
    """A row's measured and predicted numbers, or the reason why there are none."""
    fields = (str(row.config.get(field, "")) for field in ("size", "context_length", "attention", "bytes"))
    case = row.case
    if case == "all-reduce":  # which has rows of other collectives, too, and all of them name theirs
        case = str(row.config.get("collective", case))
    words = " ".join((case, *fields, row.variant)).split()
    name = " ".join(dict.fromkeys(words))  # some variants name their kernel
    try:
        return _compare(name, row)
    except KeyError as found:
        reason = f"the row has no {found}"
    except ValueError as found:
        reason = str(found)
    except (TypeError, AttributeError, ArithmeticError, MemoryError) as found:  # rows may come from anywhere
        reason = f"the row has a value that cannot be: {found}"
    return Comparison(name=name, note=reason)


def _compare(name: str, row: Measured) -> Comparison:
    if row.status != "ok":
        raise ValueError(f"status {row.status}")
    card = card_of(row)
    if row.case == "all-reduce":
        return _compare_collective(name, row, card)
    job = job_of(row)
    if is_of_cpu(row):  # whose peak is that of the whole process, and which has no card's rates
        raise ValueError("of a CPU nothing is predicted")
    peak, step = row.metrics.get("peak_memory_bytes"), row.metrics.get("step_ms", {})
    milliseconds = step.get("p50", step.get("mean"))
    memory = None if peak is None else (positive("peak_memory_bytes", peak), peak_bytes(job))
    seconds = None
    if milliseconds is not None and card is not None:
        seconds = positive("step_ms", milliseconds) / 1e3, step_seconds(job, card)
    note = "" if card is not None else _UNKNOWN
    return Comparison(name=name, recorded=job.cuda_graph, memory=memory, seconds=seconds, note=note)


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


def summary(errors: Sequence[float | None]) -> str:
    """The mean and the largest of errors without their sign."""
    known = [abs(e) for e in errors if e is not None and math.isfinite(e)]
    if not known:
        return "nothing to compare"
    return f"mean {sum(known) / len(known):.1%}, max {max(known):.1%} of {len(known)} rows"


def check_text(found: Sequence[Comparison]) -> str:
    """All rows by file, measured, predicted and the error, and below them how large the errors are."""
    compared = [each for each in found if each.memory or each.seconds]
    lines = [_HEADER, *(_line(each) for each in compared)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
    table, file = [], ""
    for each, line in zip([None, *compared], lines, strict=True):
        if each is not None and each.file != file:
            file = each.file
            table.append(f"{file}:")
        cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 7)), line[7]]
        table.append("  ".join(cells).rstrip())
    steps = [each for each in found if each.is_step]
    recorded = [each for each in steps if each.recorded]
    transfers = [each for each in found if not each.is_step]
    sent = [f"collectives:                        {summary([error(each.seconds) for each in transfers])}"]
    left_out = Counter(each.note for each in found if each not in compared)
    return "\n".join([
        *table,
        *(f"not compared, {count} rows: {note}" for note, count in left_out.items()),
        "",
        f"peak memory:                        {summary([error(each.memory) for each in found])}",
        f"step time, recorded as CUDA graphs: {summary([error(each.seconds) for each in recorded])}",
        f"step time, all:                     {summary([error(each.seconds) for each in steps])}",
        *(sent if transfers else []),
        "The predicted time is the GPU's. Without a CUDA graph (*) the host may take longer to launch the kernels.",
    ])  # fmt: skip


def _line(each: Comparison) -> tuple[str, ...]:
    def pair(values: tuple[float, float] | None, unit: float, digits: int) -> tuple[str, str, str]:
        if values is None:
            return "-", "-", "-"
        return f"{values[0] / unit:.{digits}f}", f"{values[1] / unit:.{digits}f}", f"{values[1] / values[0] - 1:+.1%}"

    mark = each.note or ("*" if each.is_step and not each.recorded and each.seconds is not None else "")
    return (each.name, *pair(each.memory, GIB, 2), *pair(each.seconds, 1e-3, 1 if each.is_step else 3), mark)


def check_json(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The same as plain JSON types."""

    def pair(values: tuple[float, float] | None) -> dict[str, float] | None:
        return (
            None
            if values is None
            else {"measured": values[0], "predicted": values[1], "error": values[1] / values[0] - 1}
        )

    return [
        {"row": each.name, "file": each.file, "recorded": each.recorded, "note": each.note}
        | {"memory_bytes": pair(each.memory), "step_s": pair(each.seconds)}
        for each in found
    ]
