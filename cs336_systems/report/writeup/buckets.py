"""What the size of a bucket changes, measured and by the handout's model: the problem ddp_bucketed_benchmarking."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ...accounting import num_parameters
from ...bench.case import Row
from ...model_config import ModelConfig
from ...planner.cards import get_card
from ...planner.communication import MIB, all_reduce_cost, best_bucket_bytes, bucket_overhead, overhead_sections
from ...planner.rows import card_of
from ...planner.working import Section
from ..bucket_size import with_added
from .claims import Evidence, listing, mib, ms, one_setting, p50
from .steps import FAR, SETTING, steps


def buckets(e: Evidence) -> str | None:
    """(a) The best measured bucket, recorded and eager, in bucket-size or, where that was not measured, in ddp."""
    found = [rows for is_recorded in (True, False) if (rows := _by_bucket(e, is_recorded))]
    if not found:
        return _buckets_of_ddp(e)
    told = []
    for rows in found:
        best = min(rows, key=_added)
        of = f", of buckets of {listing([_size(row) for row in rows])} MiB" if rows is found[0] else ""
        how = _how(best) if rows is found[0] else _how(best).lower()
        told.append(f"{how}{of} those of {_size(best)} MiB add least, {ms(_added(best))} a step")
    return " ".join([f"(a) {'; '.join(told)}.", *_beside_the_model(found[0])])


def _by_bucket(e: Evidence, is_recorded: bool) -> list[Row]:
    """Rows of bucket-size with what they add, by size, of the run that has most."""
    found = []
    for run in e.runs("bucket-size"):
        rows = [row for row in with_added(run) if "added_ms" in row.metrics]
        rows = [row for row in rows if bool(row.config.get("cuda_graph")) is is_recorded]
        found.append(sorted(one_setting(rows, *SETTING, "compile"), key=lambda row: row.config["bucket_size_mb"]))
    return max(reversed(found), key=len, default=[])


def _beside_the_model(rows: Sequence[Row]) -> list[str]:
    """The model's optimum, and what the model leaves out, where rows show it."""
    model = [row for row in with_predictions(rows) if row.metrics.get("predicted")]
    if not model:
        return []
    best = model[0].metrics["predicted"]["best_mb"]
    told = [f"The model of (b) has its optimum at {_mib(best)} MiB."]
    near = min(model, key=lambda row: abs(row.config["bucket_size_mb"] - best))
    predicted = near.metrics["predicted"]["added_ms"]
    if _added(near) > FAR * predicted:
        told.append(
            f"With {_size(near)} MiB it predicts {ms(predicted)}, measured are {ms(_added(near))}: it counts hidden "
            "transfers as free, where they slow down what they hide behind."
        )
    small = model[0]
    predicted, calls = small.metrics["predicted"]["added_ms"], small.metrics.get("buckets")
    counted = _counted_calls(small)
    if calls and calls < counted and _added(small) < predicted:
        told.append(
            f"With {_size(small)} MiB it predicts {ms(predicted)}, measured are {ms(_added(small))}: it counts "
            f"{counted:,.0f} calls, but a tensor is never divided, and there are {calls}."
        )
    return told


def with_predictions(rows: Sequence[Row]) -> list[Row]:
    """Rows with what the planner's own figures of their card predict, so that all of an answer is of the same figures.

    What a row bears was fitted to the all-reduces that were at hand on its day. Rows of an unknown card keep that.
    """
    found = []
    for row in rows:
        card, size = card_of(row), row.config.get("bucket_size_mb")
        if card is not None and size is not None and "predicted" in row.metrics:
            overhead_s, bandwidth = all_reduce_cost(card, row.config["devices"])
            nbytes = _gradient_bytes(row)
            predicted = {
                "added_ms": bucket_overhead(nbytes, bandwidth, overhead_s, size * MIB) * 1e3,
                "best_mb": best_bucket_bytes(nbytes, bandwidth, overhead_s) / MIB,
            }
            row = replace(row, metrics=row.metrics | {"predicted": predicted})
        found.append(row)
    return found


def _gradient_bytes(row: Row) -> float:
    return 4.0 * num_parameters(ModelConfig(size=row.config["size"], context_length=row.config["context_length"]).shape)


def _counted_calls(row: Row) -> float:
    """Buckets of a row's size that the model counts, as if tensors could be divided."""
    return _gradient_bytes(row) / (row.config["bucket_size_mb"] * MIB)


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
    """The equations, and what they give for xl on two H200."""
    nbytes, bandwidth, overhead_s = _xl_on_two()
    best = best_bucket_bytes(nbytes, bandwidth, overhead_s)
    return (
        "(b) With s bytes of gradients in n buckets, w bytes/s and o seconds a call, communication adds "
        "`s / (w n) + o n` after the backward pass; its derivative is 0 at `n = sqrt(s / (w o))`, a bucket of "
        f"`sqrt(s w o)` bytes, which for xl on two H200, at the planner's {bandwidth / 1e9:.0f} GB/s and "
        f"{overhead_s * 1e6:.0f} us a call, is {mib(best)}.{_optimum_of_the_day(e, best)}"
    )


def _optimum_of_the_day(e: Evidence, best_bytes: float) -> str:
    """Why a size was measured that is near no round number: by the figures of its day it was the optimum."""
    for row in e.ok("bucket-size", "predicted"):
        size, then = row.config.get("bucket_size_mb"), (row.metrics["predicted"] or {}).get("best_mb")
        if size and then and abs(size / then - 1) < 1e-3 and _mib(then) != _mib(best_bytes / MIB):
            return f" The {_mib(size)} MiB that are measured were the optimum by the figures at hand on that day."
    return ""
