"""What is shown of the case `bucket-size`: what buckets add to a step of one GPU alone, by bucket size."""

from collections.abc import Sequence
from dataclasses import replace

from ..bench.row import Row
from .view import Column, Plot, View, grouped

_SETTING = ("size", "devices", "context_length", "batch_size", "precision", "compile", "cuda_graph")
_LINES = ("size", "compile", "cuda_graph")
_ADDED = Column("added (ms)", "added_ms", ".2f")
_PREDICTED = Column("predicted (ms)", "predicted.added_ms", ".2f")


def with_added(rows: Sequence[Row]) -> list[Row]:
    """Rows with what their step takes more than that of one GPU alone, if that was measured too."""
    alone: dict[int, float] = {}
    for group in grouped(rows, _SETTING):
        times = [row.metrics["step_ms"]["p50"] for row in group if row.variant.startswith("alone") and _is_ok(row)]
        alone |= {id(row): times[-1] for row in group if times}
    found = []
    for row in rows:
        if _is_ok(row) and id(row) in alone and not row.variant.startswith("alone"):
            by_itself = alone[id(row)]
            added = row.metrics["step_ms"]["p50"] - by_itself
            row = replace(row, metrics={**row.metrics, "added_ms": added, "added": added / by_itself})
        found.append(row)
    return found


def _is_ok(row: Row) -> bool:
    return row.status == "ok"


VIEW = View(
    keys=(*_SETTING, "bucket_size_mb"),
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
    plots=(Plot(name="added", y=_ADDED, x="bucket_size_mb", lines=_LINES, log="x", beside=_PREDICTED),),
    derive=with_added,
)
