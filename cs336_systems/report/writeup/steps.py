"""Steps of strategies that sentences compare: those of one run, and how far several runs lie apart."""

import math
from collections.abc import Mapping, Sequence

from ...bench.row import Row
from .claims import Evidence, is_alike, of_2026, one_setting, p50, peak, percent

SETTING = ("devices", "size", "context_length", "batch_size", "precision")
FAR = 1.2
"""So many times as long is told as far longer."""
ALONE = "alone"
Steps = Mapping[str, Row]
"""Rows of one run and setting, by variant."""
HOWS = {"": "eager", "+graph compiled": "compiled and recorded as a CUDA graph"}
"""What names of variants end in, and how such steps ran."""


def steps(e: Evidence, case: str = "ddp") -> list[Steps]:
    """The steps of a case of one setting, run by run, the last run last.

    The setting is that of 2026's xl, or that which has most.
    """
    setting = (*SETTING, "compile") if case != "ddp" else SETTING
    of_one = one_setting(of_2026(e.ok(case, "step_ms")), *setting)
    if not of_one:
        return []
    found: list[Steps] = []
    for run in e.runs(case):
        alike = [row for row in run if "step_ms" in row.metrics and is_alike(row, of_one[0], setting)]
        found.append({row.variant: row for row in alike})
    return found


def pairs(runs: Sequence[Steps], variant: str, other: str) -> list[tuple[Row, Row]]:
    """A variant's step and another's of each run that has both: each run is a launch of processes of its own."""
    return [(run[variant], run[other]) for run in runs if variant in run and other in run]


def ratios(found: Sequence[tuple[Row, Row]]) -> list[float]:
    """How many times as long as the second the first of each pair is, the least first."""
    return sorted(p50(ours) / p50(theirs) for ours, theirs in found)


def told_pair(runs: Sequence[Steps], variant: str, other: str) -> tuple[Row, Row, list[float]] | None:
    """`told_of` the pairs of a variant's step and another's."""
    return told_of(pairs(runs, variant, other))


def told_of(found: Sequence[tuple[Row, Row]]) -> tuple[Row, Row, list[float]] | None:
    """The pair with most steps of its first, the last of equal ones, and the ratios of the others, the least first.

    None where there is no pair.
    """
    if not found:
        return None
    told = max(reversed(found), key=lambda pair: step_count(pair[0]))
    return (*told, ratios([pair for pair in found if pair is not told]))


def step_count(row: Row) -> int:
    """How many steps were measured."""
    return len(row.metrics.get("steps_ms", ()))


def is_within_spread(one: Row, other: Row) -> bool:
    """Whether the slower steps of the faster row are as slow as the faster steps of the other: of ten, eighth, second.

    False for rows without these.
    """
    fast, slow = sorted((one, other), key=p50)
    return bool(slow.metrics["step_ms"].get("p20", math.inf) <= fast.metrics["step_ms"].get("p80", 0))


def peak_bytes(runs: Sequence[Steps], row: Row) -> float | None:
    """The peak memory of a row, or of its variant in the last run that measured it; None where none did."""
    found = [run[row.variant] for run in runs if row.variant in run]
    return next((peak(each) for each in (row, *reversed(found)) if "peak_memory_bytes" in each.metrics), None)


def difference(ours: Row, theirs: Row, others: Sequence[float], than: str = "", of: str = "") -> str:
    """How much longer or shorter a step is, and what other launches have: "5.0% longer (20% longer in 1 other launch)".

    ours, theirs, others: what `told_of` gives. than: what comes after the first of the two. of: after launches.
    """
    ratio = p50(ours) / p50(theirs)
    text = f"{longer_or_shorter([ratio, ratio])}{than}"
    notes = ["within their spread"] if is_within_spread(ours, theirs) else []
    if others:
        notes.append(_in_other_launches(ratio, others, of))
    return f"{text} ({'; '.join(notes)})" if notes else text


def _in_other_launches(ratio: float, others: Sequence[float], of: str) -> str:
    undecided = ""
    if is_undecided(others):
        undecided = f", longer in {sum(each > 1 for each in others)} of them"
    elif is_undecided(sorted((*others, ratio))):
        undecided = ", so that it is undecided which is shorter"
    launches = "1 other launch" if len(others) == 1 else f"{len(others)} other launches"
    return f"{longer_or_shorter(others)} in {launches}{of}{undecided}"


def longer_or_shorter(found: Sequence[float]) -> str:
    """Of ratios, the least first: "20% shorter", "10% to 20% longer", "5.0% shorter to 10% longer"."""
    ends = [(percent(abs(1 - ratio)), "shorter" if ratio < 1 else "longer") for ratio in (found[0], found[-1])]
    (least, low), (most, high) = ends
    if low != high:
        return f"{least} {low} to {most} {high}"
    first, last = (least, most) if high == "longer" else (most, least)
    return f"{first} {low}" if first == last else f"{first} to {last} {low}"


def is_undecided(found: Sequence[float]) -> bool:
    """Whether of ratios, the least first, some are below 1 and others above."""
    return found[0] < 1 < found[-1]
