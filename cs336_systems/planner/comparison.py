"""A row's measured and predicted numbers side by side, and which aims of the planner they meet."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PEAK = "peak"
PEAK_OF_ACTIVATIONS = "peak beyond weights and gradients"
SAVED_BY_BLOCK = "saved for backward by a block"
HELD_BEFORE_BACKWARD = "held before backward"
PEAKS = (PEAK, PEAK_OF_ACTIVATIONS)
Pair = tuple[float, float]
"""Measured and predicted."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row's memory in bytes and time in s, measured and predicted; None where there is no such pair."""

    name: str
    file: str = ""
    """The file that the row is from, if there are several."""
    recorded: bool = False
    """Whether the step was recorded as a CUDA graph, so that it is not host-bound."""
    is_step: bool = True
    """Whether the row is of a training step, and not of a part of one or of one collective."""
    is_large_alone: bool = False
    """Whether the step is of a model of size large or above, on one H200."""
    slowed_by: str = ""
    """What lowered the GPU's clock at the end of the measurement."""
    memory_of: str = PEAK
    """Which memory is compared: one of PEAKS, or what is kept for the backward pass."""
    memory: Pair | None = None
    seconds: Pair | None = None
    note: str = ""


def error(pair: Pair | None) -> float | None:
    """Predicted / measured - 1."""
    return None if pair is None else pair[1] / pair[0] - 1


@dataclass(frozen=True)
class Aim:
    """How far off predictions may be, and for which rows."""

    name: str
    text: str
    within: float
    pair: Callable[[Comparison], Pair | None]
    """The pair of a row that the aim is about; None where it does not apply."""
    is_time: bool = False

    def met(self, each: Comparison) -> bool | None:
        """Whether a row meets it; None where it does not apply, and where the error is not finite."""
        found = error(self.pair(each))
        return None if found is None or not math.isfinite(found) else abs(found) <= self.within


AIMS = (
    Aim("memory", "peak memory within 5 %", 0.05, lambda each: each.memory if each.memory_of in PEAKS else None),
    Aim(
        "time",
        "step time within 15 %, large and above on one H200",
        0.15,
        lambda each: each.seconds if each.is_step and each.is_large_alone else None,
        is_time=True,
    ),
)
_SHOWN = 10


def verdict_lines(found: Sequence[Comparison]) -> list[str]:
    """How many rows meet each aim, and below it those that miss it, the largest error first: at most 10."""
    lines = []
    for aim in AIMS:
        counts = _counts(aim, found)
        verdict = f"{counts['met']} of {counts['rows']} rows" if counts["rows"] else "no row that it applies to"
        if aim.is_time and counts["recorded_rows"]:
            verdict += f" ({counts['recorded_met']} of the {counts['recorded_rows']} recorded as CUDA graphs)"
        missed = [each for each in found if aim.met(each) is False]
        missed.sort(key=lambda each: -abs(error(aim.pair(each)) or 0))
        lines += [f"aim: {aim.text}: {verdict}", *(_missed_line(aim, each) for each in missed[:_SHOWN])]
        if len(missed) > _SHOWN:
            lines.append(f"  and {len(missed) - _SHOWN} more")
    return lines


def _counts(aim: Aim, found: Sequence[Comparison]) -> dict[str, int]:
    all_met = [(aim.met(each), each.recorded) for each in found]
    known = [(met, recorded) for met, recorded in all_met if met is not None]
    counts = {"rows": len(known), "met": sum(met for met, _ in known)}
    if aim.is_time:
        counts |= {
            "recorded_rows": sum(recorded for _, recorded in known),
            "recorded_met": sum(met and recorded for met, recorded in known),
        }
    return counts


def _missed_line(aim: Aim, each: Comparison) -> str:
    off = error(aim.pair(each)) or 0
    why = []
    if aim.is_time and off < 0:
        why += [] if each.recorded else ["the host may set the pace"]
        why += [f"the GPU's clock was lowered by {each.slowed_by}"] if each.slowed_by else []
    where = f" in {each.file}" if each.file else ""
    return f"  {off:+.1%}  {each.name}{where}{': ' if why else ''}{', and '.join(why)}"
