"""What the size of a bucket changes, measured and by the handout's model: the problem ddp_bucketed_benchmarking."""

import math
import re
from collections.abc import Sequence

from ...bench.row import Row
from ...config.model import ModelConfig
from ...planner.accounting import num_parameters
from ...planner.cards import get_card
from ...planner.communication import MIB, all_reduce_cost, best_bucket_bytes, overhead_sections
from ...planner.working import Section
from ..strategy_tables import with_added
from .claims import Evidence, is_xl_2026, listing, mib, ms, one_setting, p50
from .steps import ALONE, FAR, SETTING, is_within_spread, steps

_EXPECTED = (
    "(a) Expected: small buckets pay for many calls, and a large last one is sent after the backward pass; the best "
    "lies in between."
)
_CLOSER = "Results would come closer {where}with a slower link."
_PACED = "where the GPU, not the host, sets the pace (recorded steps, longer contexts), and "


def buckets(e: Evidence) -> str | None:
    """(a) Expected and measured, recorded and eager, in bucket-size or, where that was not measured, in ddp."""
    found = [rows for is_recorded in (True, False) if (rows := _by_bucket(e, is_recorded))]
    if not found:
        return _buckets_of_ddp(e)
    sizes = listing([_size(row) for row in found[0]])
    told = f"{'; '.join(map(_best_bucket, found))}."
    return " ".join([f"{_EXPECTED} Measured with {sizes} MiB: {told}", *_beside_the_model(e, found[0])])


def _best_bucket(rows: Sequence[Row]) -> str:
    """The size that adds least, and those that cannot be told apart from it."""
    best = min(rows, key=_added)
    alike = [f"{_size(row)} MiB" for row in rows if row is not best and is_within_spread(row, best)]
    how = _how(best)
    text = f"{how[0].lower()}{how[1:]}, {_size(best)} MiB adds least, {ms(_added(best))} a step"
    return f"{text} (not distinguishable from {listing(alike)})" if alike else text


def _by_bucket(e: Evidence, is_recorded: bool) -> list[Row]:
    """Rows of bucket-size with what they add, by size, of the run that has most."""
    found = []
    for run in e.runs("bucket-size"):
        rows = [row for row in with_added(run) if "added_ms" in row.metrics]
        rows = [row for row in rows if bool(row.config.get("cuda_graph")) is is_recorded]
        found.append(sorted(one_setting(rows, *SETTING, "compile"), key=lambda row: row.config["bucket_size_mb"]))
    return max(reversed(found), key=len, default=[])


def _beside_the_model(e: Evidence, rows: Sequence[Row]) -> list[str]:
    """What the model of (b) predicts of these rows, where and why it is off, and what would bring both together."""
    model = [row for row in rows if row.metrics.get("predicted")]
    if not model:
        return []
    told = []
    near = min(model, key=lambda row: abs(row.config["bucket_size_mb"] - row.metrics["predicted"]["best_mb"]))
    predicted = near.metrics["predicted"]["added_ms"]
    if is_off := _added(near) > FAR * predicted:
        told.append(
            f"At {_size(near)} MiB the model of (b) predicts {ms(predicted)}, but {ms(_added(near))} are measured: it "
            f"counts hidden transfers as free, while they slow down the computing that hides them.{_in_profiles(e)}"
        )
    small = model[0]
    predicted, calls = small.metrics["predicted"]["added_ms"], small.metrics.get("buckets")
    counted = _counted_calls(small)
    if calls and calls < counted and _added(small) < predicted:
        told.append(
            f"At {_size(small)} MiB it predicts {ms(predicted)}, but {ms(_added(small))} are measured: it counts "
            f"{counted:,.0f} calls, but a tensor is never split, so there are {calls}."
        )
    return [*told, _CLOSER.format(where="" if near.config.get("cuda_graph") else _PACED)] if is_off else told


def _in_profiles(e: Evidence) -> str:
    """What profiled recorded steps say of that: how long they compute, beside one GPU alone, and what is not hidden."""
    names = ("compute_ms", "communication_ms", "both_ms")
    for run in reversed(steps(e.where(lambda row: not is_xl_2026(row)))):
        alone = run.get(f"{ALONE}+graph")
        found = [row for name, row in run.items() if re.fullmatch(r"bucketed:[\d.]+\+graph", name)]
        found = [row for row in found if all(name in row.metrics for name in names)]
        if alone is None or not found:
            continue
        computing, sent, both = (found[-1].metrics[name] for name in names)
        if computing > p50(alone):
            return (
                f" Profiled, recorded but not compiled, `{found[-1].variant.partition('+')[0]}` computes for "
                f"{ms(computing)}, where one GPU alone takes {ms(p50(alone))} in all, and has {ms(sent - both)} of "
                "communication exposed."
            )
    return ""


def _counted_calls(row: Row) -> float:
    """Calls as the model counts them: all gradients in buckets of equal size."""
    return math.ceil(_gradient_bytes(row) / (row.config["bucket_size_mb"] * MIB))


def _gradient_bytes(row: Row) -> float:
    return 4.0 * num_parameters(ModelConfig(size=row.config["size"], context_length=row.config["context_length"]).shape)


def _buckets_of_ddp(e: Evidence) -> str | None:
    runs = [{name: row for name, row in run.items() if re.fullmatch(r"bucketed:[\d.]+", name)} for run in steps(e)]
    found = max(reversed(runs), key=len, default={})
    if len({p50(row) for row in found.values()}) < 2:
        return None
    best_name, worst_name = min(found, key=lambda n: p50(found[n])), max(found, key=lambda n: p50(found[n]))
    size = found[best_name].config["size"]
    larger_is_better = float(best_name.partition(":")[2]) > float(worst_name.partition(":")[2])
    why = (
        "the smaller the buckets, the more calls, each of which costs the host time"
        if larger_is_better
        else "larger buckets wait longer for their gradients"
    )
    return (
        f"(a) Eager, of {listing([f'`{name}`' for name in found])} the step of {size} is shortest with `{best_name}` "
        f"({ms(p50(found[best_name]))}) and longest with `{worst_name}` ({ms(p50(found[worst_name]))}): {why}."
    )


def _added(row: Row) -> float:
    return row.metrics["added_ms"]


def _how(row: Row) -> str:
    recorded = ", the step recorded as a CUDA graph" if row.config.get("cuda_graph") else ""
    return f"{'Compiled' if row.config['compile'] else 'Eager'}{recorded}"


def _size(row: Row) -> str:
    return _mib(row.config["bucket_size_mb"])


def _mib(size: float) -> str:
    return mib(size * MIB).removesuffix(" MiB")


def bucket_working() -> list[Section]:
    """The model of what buckets add, for xl on two H200."""
    return overhead_sections(*_xl_on_two())


def _xl_on_two() -> tuple[float, float, float]:
    """Bytes of gradients, bandwidth in bytes/s and seconds a call."""
    overhead_s, bandwidth = all_reduce_cost(get_card("H200"), 2)
    return 4.0 * num_parameters(ModelConfig(size="xl", context_length=512).shape), bandwidth, overhead_s


def bucket_optimum(e: Evidence) -> str:
    """(b) The equations, and what they give for xl on two H200."""
    nbytes, bandwidth, overhead_s = _xl_on_two()
    best = best_bucket_bytes(nbytes, bandwidth, overhead_s)
    return (
        "(b) With s bytes of gradients in n buckets, w bytes/s and o seconds a call, communication adds "
        "`s / (w n) + o n` after the backward pass; its derivative is 0 at `n = sqrt(s / (w o))`, a bucket of "
        f"`sqrt(s w o)` bytes. For xl on two H200, whose all-reduces fit w = {bandwidth / 1e9:.0f} GB/s and o = "
        f"{overhead_s * 1e6:.0f} us, that is {mib(best)}.{_optimum_of_the_rows(e, best)}"
    )


def _optimum_of_the_rows(e: Evidence, best_bytes: float) -> str:
    """The optimum that rows bear, fitted to the all-reduces beside them, where it is another one."""
    for row in e.ok("bucket-size", "predicted"):
        best_mb = (row.metrics["predicted"] or {}).get("best_mb")
        if best_mb and _mib(best_mb) != _mib(best_bytes / MIB):
            return f" By the all-reduces of the machine that was measured it is {_mib(best_mb)} MiB."
    return ""
