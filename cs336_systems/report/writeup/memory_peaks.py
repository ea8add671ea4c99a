"""Peaks of memory by length, mode and precision, measured and counted."""

from collections.abc import Mapping, Sequence
from typing import Literal

from ...bench.row import Row
from ...config.model import ModelConfig
from ...planner.activations import saved_bytes
from ...planner.job import Job
from ...planner.memory import copy_terms, peak_bytes
from ...planner.memory import peak as moment_of_peak
from ...planner.rows import card_of
from ..markdown import markdown_table
from ..selection import OUTCOMES
from .claims import XL_2026, Evidence, gib, is_xl_2026, listing, one_setting, peak
from .profiling import float32_attention
from .timing import WAY

LENGTHS, MODES = (128, 2048), ("forward", "train_step")
"""What the handout of 2026 asks for."""
_NEAR = 0.02  # of a peak: as far as the planner's may be from that measured, where it is told as the reason
_Peaks = Mapping[tuple[int, str, str], Row]
"""Rows by length, mode and precision."""


def words(mode: str) -> str:
    """What a mode is called."""
    return {"forward": "forward pass", "forward_backward": "forward and backward pass"}.get(mode, "train step")


def job_of(length: int, precision: Literal["fp32", "bf16"] = "fp32") -> Job:
    """An eager step of 2026's xl, as it is profiled."""
    shape = ModelConfig(size=XL_2026, context_length=length).shape
    return Job(shape=shape, precision=precision, attention="naive", clip=False)


def _by_case(e: Evidence) -> list[_Peaks]:
    """The rows of 2026's xl, also those out of memory: of the case model, of the memory profiler.

    The latter come last where the profiler has recorded both modes, else first: of two of one setting the last is told.
    """
    of_profiler = [row for row in e.all("profile-memory") if is_xl_2026(row)]
    of_model = one_setting([row for row in e.all("model") if is_xl_2026(row)], *WAY[1:])
    is_whole = {row.config["mode"] for row in of_profiler} >= set(MODES)
    return [
        {(row.config["context_length"], row.config["mode"], row.config["precision"]): row for row in rows}
        for rows in ((of_model, of_profiler) if is_whole else (of_profiler, of_model))
    ]


def _peaks(e: Evidence) -> _Peaks:
    first, last = _by_case(e)
    return {**first, **last}


def _peak_bytes(row: Row) -> float | None:
    """The peak of a row of either case; None where memory was short."""
    if row.status != "ok":
        return None
    return row.metrics["peak_bytes"] if "peak_bytes" in row.metrics else peak(row)


def _told(row: Row) -> str:
    size = _peak_bytes(row)
    return OUTCOMES["oom"] if size is None else gib(size)


def peaks_by_length(e: Evidence) -> str:
    """(b) Peaks of a forward pass and of a training step, by the planner those that are not measured."""
    found = _peaks(e)
    lengths = sorted({length for length, _, precision in found if precision == "fp32"})
    told = []
    for mode in MODES:
        at = [f"{_told(row)} at {n} tokens" for n in lengths if (row := found.get((n, mode, "fp32"))) is not None]
        told += [f"{words(mode)} {listing(at)}"] if at else []
    parts = [f"(b) Peaks of {XL_2026} in fp32: {'; '.join(told)}{_of_two_cases(e)}." if told else "(b)"]
    missing = [n for n in LENGTHS if (row := found.get((n, "train_step", "fp32"))) is None or row.status != "ok"]
    if missing:
        counted = listing([f"{gib(peak_bytes(job_of(n)))} at {n} tokens" for n in missing])
        parts.append(f"For a train step the planner counts {counted}{_beside_the_card(missing, found)}.")
    forward = [str(n) for n in LENGTHS if (n, "forward", "fp32") not in found]
    if forward and told:
        parts.append(f"A forward pass at {listing(forward)} tokens is not measured yet.")
    return " ".join(parts)


def _of_two_cases(e: Evidence) -> str:
    """That peaks are of two cases, where some of either are told, and how far the same step's lie apart."""
    first, last = _by_case(e)
    both = [(_peak_bytes(first[setting]), _peak_bytes(last[setting])) for setting in first if setting in last]
    apart = [abs(one - other) for one, other in both if one and other]
    if not apart or first.keys() <= last.keys():
        return ""
    return f" (of the memory profiler and of `bench model`, whose peaks of one step are up to {gib(max(apart))} apart)"


def _beside_the_card(lengths: Sequence[int], found: _Peaks) -> str:
    """Which of some lengths the card has no memory for by count, and which were out of memory in bf16."""
    card = next((card for row in found.values() if (card := card_of(row)) is not None), None)
    if card is None:
        return ""
    too_long = [n for n in lengths if peak_bytes(job_of(n)) > card.memory_gib * 2**30]
    if not too_long:
        return f", and the card ({card.name}) has {card.memory_gib:g} GiB"
    failed = [n for n in too_long if (row := found.get((n, "train_step", "bf16"))) is not None and row.status == "oom"]
    at = f" at {listing([str(n) for n in too_long])}" if len(lengths) > 1 else ""
    measured = [f"{gib(peak_bytes(job_of(n, 'bf16')))} at {n} tokens" for n in failed]
    told = f"; in bf16, for which it counts {listing(measured)}, it was measured and is {OUTCOMES['oom']}"
    return f": it does not fit in the card's {card.memory_gib:g} GiB ({card.name}){at}{told if failed else ''}"


def _pairs(e: Evidence, mode: str) -> list[tuple[int, float, float]]:
    """Peaks of a mode in fp32 and bf16 by length, both of one case."""
    found = {}
    for rows in _by_case(e):
        for length in (n for n, *way in rows if way == [mode, "fp32"]):
            single, other = rows[length, mode, "fp32"], rows.get((length, mode, "bf16"))
            if other is not None and (fp32 := _peak_bytes(single)) and (bf16 := _peak_bytes(other)):
                found[length] = (length, fp32, bf16)
    return [found[length] for length in sorted(found)]


def memory_by_precision(e: Evidence) -> str | None:
    """(c) What mixed precision does to the peaks of a forward pass and of a training step, and why."""
    pairs = {mode: own for mode in MODES if (own := _pairs(e, mode))}
    if not pairs:
        return None
    told = []
    for mode, own in pairs.items():
        changes = [
            f"from {gib(fp32)} to {gib(bf16)}, {_change(bf16 / fp32 - 1)}, at {length} tokens"
            for length, fp32, bf16 in sorted({pick(own, key=lambda each: each[2] / each[1]) for pick in (min, max)})
        ]
        told.append(f"a {words(mode)} goes {listing(changes)}")
    why = "Weights, gradients and optimizer state stay float32, and autocast adds 16-bit copies of the weights"
    needs_more = any(bf16 > fp32 for _, fp32, bf16 in pairs.get("forward", ()))
    more = f"{why}: inference, which keeps no activations, needs more" if needs_more else why
    text = f"(c) Of {XL_2026} in bf16 {', and '.join(told)}. {more}; only activations become smaller."
    rows = [row for peaks in _by_case(e) for row in peaks.values()]
    return f"{text}{float32_attention(rows)}{_counted(pairs.get('train_step', []))}"


def _change(share: float) -> str:
    return f"{share:+.0%}" if abs(share) >= 0.005 else "no change"


def _counted(pairs: Sequence[tuple[int, float, float]]) -> str:
    """What of a step's change is of weight copies and activations, at the lengths at which the planner has it right."""
    right = []
    for length, fp32, bf16 in pairs:
        counted = peak_bytes(job_of(length, "bf16")) - peak_bytes(job_of(length))
        if abs(counted - (bf16 - fp32)) <= _NEAR * fp32:
            right.append(length)
    if not right:
        return ""
    copies = copy_terms(job_of(LENGTHS[0], "bf16"))[0].value
    less = [
        f"{gib(saved_bytes(job_of(n))[0] - saved_bytes(job_of(n, 'bf16'))[0])} at {n} tokens"
        for n in dict.fromkeys((right[0], right[-1]))
    ]
    text = (
        f" By the planner the copies are {gib(copies)}, each kept until its block's backward pass is done, and what "
        f"blocks save for the backward pass is less by {listing(less)}"
    )
    level = [str(n) for n in right if _peaks_last(job_of(n)) and _peaks_last(job_of(n, "bf16"))]
    if not level:
        return f"{text}."
    return (
        f"{text}; at {listing(level)} tokens the peak is at the end of the backward pass, with copies and activations "
        "gone."
    )


def _peaks_last(job: Job) -> bool:
    """Whether a step's memory is most when the backward pass is at the first block, or over."""
    return moment_of_peak(job)[0] in ("backward of the first block", "the end of backward")


def peaks_table(rows: Sequence[Row]) -> str:
    """A line a length and mode of 2026's xl: the peaks in fp32 and bf16."""
    modes = ("forward", "forward_backward", "train_step")
    found: dict[tuple[int, str], dict[str, Row]] = {}
    for row in one_setting([row for row in rows if is_xl_2026(row)], *WAY[1:]):
        found.setdefault((row.config["context_length"], row.config["mode"]), {})[row.config["precision"]] = row
    lines = [
        [str(length), words(mode), *(_told(of[p]) if p in of else "-" for p in ("fp32", "bf16"))]
        for (length, mode), of in sorted(found.items(), key=lambda item: (item[0][0], modes.index(item[0][1])))
    ]
    header = ["context length", "step", "peak in fp32", "peak in bf16"]
    return f"{XL_2026}, eager:\n\n{markdown_table(header, lines, left=2)}" if lines else ""
