"""Parallel strategies beside one GPU alone: the table of `ddp` and the view of `bucket-size`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..bench.row import Row
from ..planner.rows import is_of_cpu
from .fields import get, number
from .markdown import markdown_table
from .selection import OUTCOMES, group_key, grouped, job_on_ranks
from .spec import Column, Plot, View

_COMPILED = " compiled"
_SETTING = ("devices", "size", "context_length", "batch_size", "precision")


def ddp_table(rows: Sequence[Row]) -> str:
    """For each machine and setting: step, spread, overhead over one GPU alone and memory of each variant.

    A second table shows the communication of a profiled step, for variants that have one.
    """
    return "\n\n".join(map(_setting_tables, grouped(rows, _SETTING)))


def _setting_tables(rows: Sequence[Row]) -> str:
    last = {row.variant: row for row in rows}
    alone: dict[tuple[bool, bool], Row] = {}
    same_launch: dict[str, Row | None] = {}  # the row of one GPU alone that was measured before the variant
    for row in rows:
        if row.variant.startswith("alone"):
            alone[_kind(row)] = row
        same_launch[row.variant] = alone.get(_kind(row))

    def step(row: Row) -> tuple[str, ...]:
        if row.status != "ok":
            return (OUTCOMES[row.status], "-", "-", "-")
        added, spread = "-", "-"
        base = same_launch[row.variant] or alone.get(_kind(row))
        if base is not None and base.status == "ok":
            added = f"{row.metrics['step_ms']['p50'] / base.metrics['step_ms']['p50'] - 1:+.1%}"
        if get(row, "metrics.step_ms.p20", None) is not None:
            spread = " to ".join(number(row, f"metrics.step_ms.{end}", ".1f") for end in ("p20", "p80"))
        peak = Column("peak", "peak_memory_bytes", ".1f", 2**30).text(row)  # missing where variants shared the memory
        return (number(row, "metrics.step_ms.p50", ".1f"), spread, added, peak)

    whose = "process, loaded libraries included," if is_of_cpu(rows[0]) else "GPU"
    head = (
        f"{job_on_ranks(rows[0])}; median step in ms, 20th to 80th percentile, time added to the median of `alone`, "
        f"peak memory per {whose} in GiB:"
    )
    parts = [head, _side_by_side(last.values(), ("step", "p20 to p80", "added", "peak"), step)]
    profiled = [row for row in last.values() if row.metrics.get("communication_ms") is not None]
    if profiled:
        parts += [
            "One more step, profiled on the first rank, which makes it longer. Times in ms: the step, its "
            "communication (including waits for other ranks) and the share of the step, and communication without "
            "any computation at the same time:",
            _side_by_side(profiled, ("profiled", "communicating", "share", "not hidden"), _communication),
        ]
    return "\n\n".join(parts)


def _kind(row: Row) -> tuple[bool, bool]:
    """Whether steps were recorded as a CUDA graph and compiled, as in the row of one GPU alone to compare with."""
    return "+graph" in row.variant, row.variant.endswith(_COMPILED)


def _communication(row: Row) -> tuple[str, ...]:
    span, sent, both = (row.metrics[f"{name}_ms"] for name in ("span", "communication", "both"))
    return f"{span:.1f}", f"{sent:.1f}", f"{sent / span:.0%}" if span else "n/a", f"{sent - both:.1f}"


def _side_by_side(rows: Iterable[Row], columns: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> str:
    """A line for each variant: its cells uncompiled and compiled, unless no row is of that kind."""
    found = {row.variant: cells(row) for row in rows}
    variants = list(dict.fromkeys(variant.removesuffix(_COMPILED) for variant in found))
    ways = {"uncompiled": "", "compiled": _COMPILED}
    ways = {way: end for way, end in ways.items() if any(variant + end in found for variant in variants)}
    header = ["variant", *(f"{name}, {way}" for way in ways for name in columns)]
    missing = ("-",) * len(columns)
    lines = [[v, *(cell for end in ways.values() for cell in found.get(v + end, missing))] for v in variants]
    return markdown_table(header, lines)


_BUCKET_KEYS = ("size", "devices", "context_length", "batch_size", "precision", "compile", "cuda_graph")
_ADDED = Column("added (ms)", "added_ms")
_PREDICTED = Column("predicted (ms)", "predicted.added_ms")


def with_added(rows: Sequence[Row]) -> list[Row]:
    """Rows with the time that their step takes beyond one GPU alone, where that was measured in the same setting."""
    done = [row for row in rows if row.status == "ok"]
    alone = {
        group_key(row, _BUCKET_KEYS): row.metrics["step_ms"]["p50"] for row in done if row.variant.startswith("alone")
    }
    found = []
    for row in rows:
        base = alone.get(group_key(row, _BUCKET_KEYS))
        if base is not None and row.status == "ok" and not row.variant.startswith("alone"):
            added = row.metrics["step_ms"]["p50"] - base
            row = replace(row, metrics={**row.metrics, "added_ms": added, "added": added / base})
        found.append(row)
    return found


BUCKET_SIZE = View(
    keys=(*_BUCKET_KEYS, "bucket_size_mb"),
    columns=(
        Column("step (ms)", "step_ms.p50"),
        Column("p20 (ms)", "step_ms.p20"),
        Column("p80 (ms)", "step_ms.p80"),
        Column("spread of ranks (ms)", "spread_ms", ".2g"),
        _ADDED,
        Column("added", "added", "+.1%"),
        _PREDICTED,
        Column("planner's optimum (MiB)", "predicted.best_mb", ".3g"),
        Column("buckets", "buckets", "d"),
        Column("peak (GiB)", "peak_memory_bytes", ".3g", 2**30),
    ),
    plots=(
        Plot(
            name="added",
            y=_ADDED,
            x="bucket_size_mb",
            lines=("size", "compile", "cuda_graph"),
            log="x",
            beside=_PREDICTED,
        ),
    ),
    derive=with_added,
)
