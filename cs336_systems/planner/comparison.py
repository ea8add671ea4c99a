"""A row's measured and predicted numbers side by side, and the planner's aims that they meet."""

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


@dataclass(frozen=True)
class Aim:
    """The largest acceptable error of predictions, and the rows to which it applies."""

    name: str
    text: str
    within: float
    pair: Callable[[Comparison], Pair | None]
    """The pair of numbers of a row; None for a row to which the aim does not apply."""
    is_time: bool = False

    def met(self, each: Comparison) -> bool | None:
        """Whether a row meets the aim; None if it does not apply or the error is not finite."""
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
    """For each aim the number of rows that meet it, and below it the rows that miss it: the 10 largest errors first."""
    lines = []
    for aim in AIMS:
        known = [(each, met) for each in found if (met := aim.met(each)) is not None]
        recorded = [met for each, met in known if each.recorded]
        verdict = f"{sum(met for _, met in known)} of {len(known)} rows" if known else "no row that it applies to"
        if aim.is_time and recorded:
            verdict += f" ({sum(recorded)} of the {len(recorded)} recorded as CUDA graphs)"
        lines.append(f"aim: {aim.text}: {verdict}")
        missed = [(error(aim.pair(each)) or 0, each) for each, met in known if not met]
        missed.sort(key=lambda each: -abs(each[0]))
        for off, each in missed[:_SHOWN]:
            why = []
            if aim.is_time and off < 0:
                why += [] if each.recorded else ["the host may set the pace"]
                why += [f"the GPU's clock was lowered by {each.slowed_by}"] if each.slowed_by else []
            where = f" in {each.file}" if each.file else ""
            lines.append(f"  {off:+.1%}  {each.name}{where}{': ' if why else ''}{', and '.join(why)}")
        if len(missed) > _SHOWN:
            lines.append(f"  and {len(missed) - _SHOWN} more")
    return lines
