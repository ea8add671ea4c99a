"""Sentences that compare steps of strategies over several GPUs, launch by launch."""

from collections.abc import Callable, Sequence

from ...bench.case import Row
from .claims import Evidence, gib, listing, ms, p50, peak, percent, span
from .steps import (
    ALONE,
    FAR,
    HOWS,
    Steps,
    is_undecided,
    launches,
    longer_or_shorter,
    of_one_run,
    pairs,
    ratios,
    steps,
)


def _setting(row: Row) -> str:
    c = row.config
    return f"{c['size']}, {c['batch_size']} x {c['context_length']} on each of {c['devices']} ranks, {c['precision']}"


def added(variant: str, part: str = "") -> Callable[[Evidence], str | None]:
    """The sentence on what a variant adds to the step of one GPU, eager and recorded as a CUDA graph."""

    def say(e: Evidence) -> str | None:
        parts, setting = [], ""
        for end, how in HOWS.items():
            if found := pairs(steps(e), variant + end, ALONE + end):
                more = [p50(ours) - p50(alone) for ours, alone in found]
                over = span(ratios(found), lambda ratio: f"{ratio - 1:+.0%}")
                shares = span((1 - 1 / ratio for ratio in ratios(found)), percent)
                share = f", {shares} of the step" if min(more) > 0 else ""
                parts.append(
                    f"{how}, {span((p50(ours) for ours, _ in found), ms)} beside "
                    f"{span((p50(alone) for _, alone in found), ms)} of one rank alone, {span(more, ms)} more "
                    f"({over}{share}){launches(len(found))}"
                )
                setting = setting or _setting(found[0][0])
        if not parts:
            return None
        return (
            f"{part}A step of {setting} with `{variant}` takes, {listing(parts)}: the difference is what "
            "communicating gradients adds."
        )

    return say


def pace_of_the_host(e: Evidence) -> str | None:
    """Why launches of eager steps differ: where the step of one rank alone does, and not the same one recorded."""
    runs = steps(e)
    eager, recorded = ([p50(run[name]) for run in runs if name in run] for name in (ALONE, f"{ALONE}+graph"))
    if not eager or not recorded or max(eager) < FAR * min(eager) or max(recorded) >= FAR * min(recorded):
        return None
    if min(eager) < FAR * max(recorded):
        return None
    return (
        f"Eager steps wait for the host, whose pace is another in each launch: one rank alone takes {span(eager, ms)}"
        f"{launches(len(eager))}, and {span(recorded, ms)} recorded as a CUDA graph. So the order of eager strategies "
        "may be another in each launch, too."
    )


def compared(variant: str, *others: str) -> Callable[[Evidence], str | None]:
    """The sentence on whether a variant's step is shorter than those of others, over all launches that have both."""

    def say(e: Evidence) -> str | None:
        parts = []
        for end, how in zip(HOWS, ("eager", "under a CUDA graph"), strict=True):
            told = []
            for other in others:
                if found := ratios(pairs(steps(e), variant + end, other + end)):
                    undecided = ", which is undecided" if is_undecided(found) else ""
                    told.append(f"{longer_or_shorter(found)} than with `{other}`{launches(len(found))}{undecided}")
            if told:
                parts.append(f"{how}, a step with `{variant}` is {listing(told)}")
        return f"{'; '.join(parts)[0].upper()}{'; '.join(parts)[1:]}." if parts else None

    return say


def waits_for_the_host(variant: str, other: str) -> Callable[[Evidence], str | None]:
    """The sentence on why a variant that hides its transfers is longer than another all the same: only if it is.

    In all launches, that is. Where the host holds an eager step up, the step of one rank alone is far longer than the
    same one recorded.
    """

    def say(e: Evidence) -> str | None:
        runs = steps(e)
        eager = of_one_run(runs, variant, other, ALONE, f"{ALONE}+graph")
        recorded = of_one_run(runs, f"{variant}+graph compiled", f"{other}+graph compiled")
        if len(eager) < 4 or not recorded or ratios(pairs(runs, variant, other))[0] <= 1:
            return None
        alone, without_host = p50(eager[ALONE]), p50(eager[f"{ALONE}+graph"])
        of_recorded = [p50(row) for row in recorded.values()]
        if alone < FAR * without_host or of_recorded[0] >= of_recorded[1]:
            return None
        return (
            f"That eager it is the longer one is the host's doing: eager steps wait for it (one rank alone takes "
            f"{ms(alone)}, recorded as a CUDA graph and not compiled {ms(without_host)}), and calls from hooks in the "
            "backward pass give it more to do; compiled and recorded, with no host to wait for, it is the shorter one."
        )

    return say


def sharded_time(e: Evidence) -> str | None:
    """(b) The step with and without a sharded optimizer, where its memory was measured and in the case ddp."""
    told: list[str] = []
    eager: list[tuple[Row, Row]] = []
    recorded: list[tuple[Row, Row]] = []
    for case in ("optimizer-sharding", "ddp"):
        runs = steps(e, case)
        told += [text] if (text := _with_and_without(runs)) else []
        for name, found in _sharded_pairs(runs).items():
            (recorded if "+graph" in name else eager).extend(found)
    if not told:
        return None
    return " ".join([f"(b) {' '.join(told)}", *_what_sharding_costs(eager, recorded)])


def _sharded_pairs(runs: Sequence[Steps]) -> dict[str, list[tuple[Row, Row]]]:
    """By the name of what is sharded, its steps beside those that are not."""
    names = dict.fromkeys(name for run in runs for name in run if "+zero1" in name)
    return {name: found for name in names if (found := pairs(runs, name, name.replace("+zero1", "")))}


def _with_and_without(runs: Sequence[Steps]) -> str | None:
    told, size = [], ""
    for name, found in _sharded_pairs(runs).items():
        ours, whole = zip(*found, strict=True)
        size = ours[0].config["size"]
        told.append(
            f"{span(map(p50, ours), ms)} instead of {span(map(p50, whole), ms)} with `{name.replace('+zero1', '')}`"
            f"{launches(len(found))}, at {span(map(peak, ours), gib)} instead of {span(map(peak, whole), gib)}"
        )
    return f"A step of {size} with the optimizer sharded takes {'; '.join(told)}." if told else None


def _what_sharding_costs(eager: Sequence[tuple[Row, Row]], recorded: Sequence[tuple[Row, Row]]) -> list[str]:
    """What the pairs come to, where there are several."""
    if len(eager) + len(recorded) < 2:
        return []
    parts = []
    for found, how in ((eager, "eager"), (recorded, "recorded as a CUDA graph")):
        if found:
            undecided = ", so that it is undecided which is the shorter one" if is_undecided(ratios(found)) else ""
            over = f" over {len(found)} pairs, each of one launch" if len(found) > 1 else ""
            parts.append(f"{how} the step is {longer_or_shorter(ratios(found))}{over}{undecided}")
    saved = [peak(whole) - peak(ours) for ours, whole in (*eager, *recorded)]
    memory = [f"The peak is {span(saved, gib)} lower."] if min(saved) > 0 else []
    return [f"With the state sharded, {'; '.join(parts)}.", *memory]
