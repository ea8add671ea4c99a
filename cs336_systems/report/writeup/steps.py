"""Steps of strategies that sentences compare: those of one run."""

from collections.abc import Mapping, Sequence

from ...bench.case import Row
from .claims import Evidence, is_alike, of_2026, one_setting

SETTING = ("devices", "size", "context_length", "batch_size", "precision")
FAR = 1.2
"""So many times as long is told as far longer."""
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


def of_one_run(runs: Sequence[Steps], variant: str, *others: str) -> Steps:
    """The steps of a variant and of others that one run has: of several the one that has most, of equal ones the last.

    Empty where no run has the variant beside another.
    """
    found = [{name: run[name] for name in (variant, *others) if name in run} for run in runs if variant in run]
    most = max(reversed(found), key=len, default={})
    return most if len(most) > 1 else {}
