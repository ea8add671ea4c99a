"""Sentences that compare steps of strategies over several GPUs: of one launch, beside the others."""

from collections.abc import Callable, Sequence
from typing import Any

from ...bench.row import Row
from ..selection import machine
from .claims import Evidence, gib, listing, ms, of_each_size, p50, peak, percent, span
from .steps import (
    ALONE,
    FAR,
    HOWS,
    SETTING,
    Steps,
    difference,
    is_within_spread,
    longer_or_shorter,
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


def setup(e: Evidence) -> str | None:
    """How the steps of strategies are measured, by the rows' own settings."""
    runs = [run for run in steps(e) if run]
    if not runs:
        return None
    c = next(iter(runs[-1].values())).config
    run = c.get("run", {})
    attention, optimizer = run.get("model", {}).get("attention"), run.get("optimizer", {}).get("implementation")
    how = "PyTorch's fused AdamW" if optimizer == "torch_fused" else "our own AdamW"
    # On a GPU auto is PyTorch's kernel.
    kernel = "PyTorch's attention" if attention in ("auto", "sdpa") else f"`{attention}`"
    return (
        f"Setup: each rank has a GPU of one host and its own batch of {c['batch_size']} sequences (weak scaling). A "
        f"step is forward, backward, communication, clipping and {how}, with {kernel}; its time is the median of "
        f"{c.get('steps', 0) * c.get('rounds', 1)} steps after {c.get('warmup', 0)} warm-up steps, on the slowest "
        "rank. `alone` is one GPU without communication."
    )


def equal_weights(variant: str, test: str) -> Callable[[Evidence], str]:
    """The sentence on what shows that a strategy trains as one process does."""

    def say(e: Evidence) -> str:
        return (
            f"`tests/parallel/{test}`: 10 steps with `{variant}` on 1, 2 and 4 ranks (gloo; NCCL on two GPUs) end in "
            "weights within 1e-4 (1e-3) of one process's, equal on all ranks to the last bit."
        )

    return say


def _hows(variant: str) -> dict[str, str]:
    """How a variant's steps ran, where their time tells of communication.

    A recorded step of naive, with one transfer a gradient after the backward pass, has gaps between them (docs/log.md).
    """
    return {end: how for end, how in HOWS.items() if not end or variant != "naive"}


def added(variant: str, is_profiled: bool = True) -> Callable[[Evidence], str | None]:
    """The sentence on what a variant adds to the step of one GPU, and, if is_profiled, for how long it communicates."""

    def say(e: Evidence) -> str | None:
        told: list[str] = []
        for end, how in _hows(variant).items():
            if (found := told_pair(steps(e), variant + end, ALONE + end)) is not None:
                ours = found[0]
                what = "it" if told else f"a step of {_setting(ours)} with `{variant}`"
                told.append(
                    f"{how[0].upper()}{how[1:]}, {what} takes {ms(p50(ours))}, "
                    f"{difference(*found, ' than one rank alone')}.{_communicating(ours) if is_profiled else ''}"
                )
        return " ".join([*told, *_recorded_with_gaps(e, variant)]) if told else None

    return say


def _recorded_with_gaps(e: Evidence, variant: str) -> list[str]:
    """On recorded steps that `_hows` leaves out, where they are far longer than those of one GPU."""
    end = "+graph"
    if variant + end in {variant + how.removesuffix(" compiled") for how in _hows(variant)}:
        return []
    found = told_pair(steps(e), f"{variant}{end} compiled", f"{ALONE}{end} compiled")
    if found is None or p50(found[0]) < FAR * p50(found[1]):
        return []
    return [
        f"Compiled and recorded as a CUDA graph it takes {ms(p50(found[0]))}, "
        f"{difference(*found, ' than one rank alone')}: recorded transfers, one a gradient, have gaps between them."
    ]


def _parts(row: Row) -> tuple[float, float] | None:
    """ms that a profiled step communicates, and of these those in which something is computed; None if not profiled."""
    if not row.metrics.get("communication_ms"):
        return None
    sent, both = row.metrics["communication_ms"], row.metrics["both_ms"]
    if not 0 <= both <= sent:
        raise ValueError(f"variant {row.variant}: both_ms is {both}: it must be from 0 to communication_ms, {sent}")
    return sent, both


def _communicating(row: Row) -> str:
    """For how long a profiled step communicates, and for how much of that nothing is computed; "" without a profile."""
    if (parts := _parts(row)) is None:
        return ""
    sent, both = parts
    idle = f"{ms(sent - both)} of that with nothing computed meanwhile" if both > 0.01 * sent else "all of it exposed"
    whole = row.metrics["span_ms"]
    share = percent(sent / whole)
    return f" In one profiled step of {ms(whole)} it communicates for {ms(sent)}, {share} of it, {idle}."


def communicates_less(variant: str, other: str) -> Callable[[Evidence], str | None]:
    """The sentence on the communication of two variants, of one launch that has profiled both."""

    def say(e: Evidence) -> str | None:
        found = [(_parts(ours), _parts(theirs), ours, theirs) for ours, theirs in pairs(steps(e), variant, other)]
        profiled = [each for each in found if each[0] is not None and each[1] is not None]
        if not profiled:
            return None
        first, second, ours, theirs = profiled[-1]
        assert first is not None
        assert second is not None
        what = longer_or_shorter([first[0] / second[0]] * 2)
        text = f"Communication itself is {what} than with `{other}` ({ms(first[0])} instead of {ms(second[0])})"
        if first[0] >= second[0] or p50(ours) <= p50(theirs) or is_within_spread(ours, theirs):
            return f"{text}."
        more = peak(ours) - peak(theirs)
        memory = f", and they take {gib(more)} more at the peak" if more > 0 else ""
        return f"{text}, but gradients are copied into one tensor and back{memory}."

    return say


def pace_of_the_host(e: Evidence) -> str | None:
    """Why launches of eager steps differ: where the step of one rank alone does, and not the same one recorded."""
    runs = steps(e)
    eager, recorded = ([p50(run[name]) for run in runs if name in run] for name in (ALONE, f"{ALONE}+graph"))
    if not eager or not recorded or max(eager) < FAR * min(eager) or max(recorded) >= FAR * min(recorded):
        return None
    return (
        f"The host sets the pace of eager steps, and differs over the {len(eager)} launches: one rank alone takes "
        f"{span(eager, ms)} eager, but {span(recorded, ms)} recorded as a CUDA graph."
    )


def compared(variant: str, *against: str) -> Callable[[Evidence], str | None]:
    """The sentence on whether a variant's step is shorter than those of others, each of one launch that has both."""

    def say(e: Evidence) -> str | None:
        parts: list[str] = []
        for end, how in zip(HOWS, ("eager", "under a CUDA graph"), strict=True):
            told, what = [], f"a step with `{variant}`"
            for other in (name for name in against if end in _hows(name)):
                if (found := told_pair(steps(e), variant + end, other + end)) is not None:
                    told.append(difference(*found, f" than with `{other}`"))
                    what = "it" if parts else f"a step of {found[0].config['size']} with `{variant}`"
            if told:
                parts.append(f"{how}, {what} is {listing(told)}")
        return f"{'; '.join(parts)[0].upper()}{'; '.join(parts)[1:]}." if parts else None

    return say


def waits_for_the_host(variant: str, other: str) -> Callable[[Evidence], str | None]:
    """The sentence on why a variant that hides its transfers is longer than another all the same: only if it is.

    In all launches, that is, and where a profile shows that it leaves less of its communication exposed.
    """

    def say(e: Evidence) -> str | None:
        found = pairs(steps(e), variant, other)
        profiled = [both for pair in found if None not in (both := [_parts(row) for row in pair])]
        exposed = [[parts[0] - parts[1] for parts in both if parts is not None] for both in profiled]
        if not exposed or ratios(found)[0] <= 1 or any(ours >= theirs for ours, theirs in exposed):
            return None
        ours, theirs = exposed[-1]
        return (
            f"It leaves less of its communication exposed all the same ({ms(ours)} instead of {ms(theirs)}): the host, "
            "to which hooks in the backward pass give more to do, sets the pace of an eager step."
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
    sent: list[tuple[tuple[float, float] | None, ...]] = []
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
        sent = [both for each in found if None not in (both := tuple(map(_parts, each)))] or sent
        for row, beside in found:
            less, more = (peak_bytes(runs, each) for each in (row, beside))
            saved += [] if less is None or more is None else [more - less]
    if not told:
        return None
    text = f"A step of {of_what} with the optimizer sharded takes {'; '.join(told)}"
    text += f"; its peak is {span(saved, gib)} less." if saved else "."
    if not sent:
        return text
    less, more = (parts[0] for parts in reversed(sent[-1]) if parts is not None)
    return (
        f"{text} A rank steps only its part of the weights, but they have to be sent: a profiled step communicates for "
        f"{ms(more)} instead of {ms(less)}."
    )
