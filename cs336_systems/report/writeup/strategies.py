"""Sentences that compare steps of strategies over several GPUs: of one launch, beside the others."""

from collections.abc import Callable, Sequence
from typing import Any

from ...bench.case import Row
from ..view import machine
from .claims import Evidence, gib, listing, ms, of_each_size, p50, percent, span
from .steps import (
    ALONE,
    FAR,
    HOWS,
    SETTING,
    Steps,
    difference,
    pairs,
    peak_bytes,
    ratios,
    steps,
    told_of,
    told_pair,
)


def _setting(row: Row) -> str:
    c = row.config
    return f"{c['size']} ({c['batch_size']} x {c['context_length']} on each of {c['devices']} ranks, {c['precision']})"


def added(variant: str) -> Callable[[Evidence], str | None]:
    """The sentence on what a variant adds to the step of one GPU, and for how long it communicates."""

    def say(e: Evidence) -> str | None:
        told: list[str] = []
        for end, how in HOWS.items():
            if (found := told_pair(steps(e), variant + end, ALONE + end)) is not None:
                ours = found[0]
                what = "it" if told else f"a step of {_setting(ours)} with `{variant}`"
                told.append(
                    f"{how[0].upper()}{how[1:]}, {what} takes {ms(p50(ours))}, "
                    f"{difference(*found, ' than one rank alone')}.{_communicating(ours)}"
                )
        return " ".join(told) if told else None

    return say


def _communicating(row: Row) -> str:
    """For how long a profiled step communicates, and for how much of that nothing is computed; "" without a profile."""
    if not row.metrics.get("communication_ms"):
        return ""
    sent, both, span_ms = (row.metrics[name] for name in ("communication_ms", "both_ms", "span_ms"))
    if not 0 <= both <= sent:
        raise ValueError(f"variant {row.variant}: both_ms is {both}: it must be from 0 to communication_ms, {sent}")

    idle = f"for {ms(sent - both)} of that" if both > 0.01 * sent else "all that time"
    share = percent(sent / p50(row))
    return (
        f" Profiled, when it takes {ms(span_ms)}, it communicates for {ms(sent)}, {share} of the step without "
        f"profiler, and {idle} nothing is computed."
    )


def pace_of_the_host(e: Evidence) -> str | None:
    """Why launches of eager steps differ: where the step of one rank alone does, and not the same one recorded."""
    runs = steps(e)
    eager, recorded = ([p50(run[name]) for run in runs if name in run] for name in (ALONE, f"{ALONE}+graph"))
    if not eager or not recorded or max(eager) < FAR * min(eager) or max(recorded) >= FAR * min(recorded):
        return None
    return (
        f"Eager steps wait for the host, whose pace is another in each of {len(eager)} launches: one rank alone takes "
        f"{span(eager, ms)}, and {span(recorded, ms)} recorded as a CUDA graph."
    )


def compared(variant: str, *against: str) -> Callable[[Evidence], str | None]:
    """The sentence on whether a variant's step is shorter than those of others, each of one launch that has both."""

    def say(e: Evidence) -> str | None:
        parts: list[str] = []
        for end, how in zip(HOWS, ("eager", "under a CUDA graph"), strict=True):
            told, what = [], f"a step with `{variant}`"
            for other in against:
                if (found := told_pair(steps(e), variant + end, other + end)) is not None:
                    told.append(difference(*found, f" than with `{other}`"))
                    what = "it" if parts else f"a step of {found[0].config['size']} with `{variant}`"
            if told:
                parts.append(f"{how}, {what} is {listing(told)}")
        return f"{'; '.join(parts)[0].upper()}{'; '.join(parts)[1:]}." if parts else None

    return say


def waits_for_the_host(variant: str, other: str) -> Callable[[Evidence], str | None]:
    """The sentence on why a variant that hides its transfers is longer than another all the same: only if it is.

    In all launches, that is, and if it is the shorter one where the step is recorded.
    """

    def say(e: Evidence) -> str | None:
        runs = steps(e)
        eager = ratios(pairs(runs, variant, other))
        recorded = ratios(pairs(runs, f"{variant}+graph compiled", f"{other}+graph compiled"))
        if not eager or not recorded or eager[0] <= 1 or recorded[-1] >= 1:
            return None
        return (
            "Eager that is the host's doing, to which hooks in the backward pass give more to do: recorded, with no "
            "host to wait for, it is the shorter one."
        )

    return say


def _sharded_time(e: Evidence) -> str | None:
    """The step with and without a sharded optimizer, on one machine: where its memory was measured, and in ddp."""
    runs: dict[tuple[Any, ...], list[Steps]] = {}
    of_ddp = list(filter(None, steps(e)))
    for run in (*filter(None, steps(e, "optimizer-sharding")), *of_ddp):
        first = next(iter(run.values()))
        if not of_ddp or machine(first) == machine(next(iter(of_ddp[0].values()))):
            runs.setdefault(tuple(first.config.get(name) for name in SETTING), []).append(run)
    told = [text for found in runs.values() if (text := _with_and_without(found))]
    return " ".join(told) if told else None


sharded_time = of_each_size(_sharded_time, part="(b) ")


def _with_and_without(runs: Sequence[Steps]) -> str | None:
    """A sharded optimizer's step beside one with the whole, of one launch, eager and recorded; and the memory it saves.

    Of each it is the launch with most steps, the last of equal ones, whichever the strategy.
    """
    told, of_what, saved = [], "", []
    names = dict.fromkeys(name for run in runs for name in run if "+zero1" in name)
    for how in dict.fromkeys(name.partition("+zero1")[2] for name in names):
        variants = [name for name in names if name.partition("+zero1")[2] == how]
        found = [each for run in runs for name in variants for each in pairs([run], name, name.replace("+zero1", ""))]
        if (one := told_of(found)) is None:
            continue
        ours, whole, _ = one
        of_what = f"{ours.config['size']} on {ours.config['devices']} ranks"
        of = " of all strategies" if len(variants) > 1 else ""
        told.append(f"{ms(p50(ours))} instead of {ms(p50(whole))} with `{whole.variant}`, {difference(*one, of=of)}")
        for row, beside in found:
            less, more = (peak_bytes(runs, each) for each in (row, beside))
            saved += [] if less is None or more is None else [more - less]
    if not told:
        return None
    text = f"A step of {of_what} with the optimizer sharded takes {'; '.join(told)}"
    return f"{text}; its peak is {span(saved, gib)} less." if saved else f"{text}."
