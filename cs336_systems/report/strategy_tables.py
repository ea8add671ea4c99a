"""Parallel strategies beside one GPU alone: the views of `ddp` and `bucket-size`."""

from collections.abc import Sequence
from dataclasses import replace

from ..bench.row import Row
from .selection import group_key
from .spec import Column, Plot, View

SETTING = ("size", "devices", "context_length", "batch_size", "precision", "compile")
STREAMS = (
    Column("profiled: first to last (ms)", "span_ms"),
    Column("computing (ms)", "compute_ms"),
    Column("communicating (ms)", "communication_ms"),
    Column("both (ms)", "both_ms"),
    Column("overlapped", "overlapped", ".0%"),
)
"""One more step, profiled on the first rank, which makes it longer. Communication includes waits for other ranks."""
_STEP = tuple(Column(f"{name} (ms)", f"step_ms.{metric}") for name, metric in
              (("step", "p50"), ("p20", "p20"), ("p80", "p80")))  # fmt: skip
_ADDED = (Column("added (ms)", "added_ms"), Column("added", "added", "+.1%"))
_PREDICTED = Column("predicted (ms)", "predicted.added_ms")
_PEAK = Column("peak (GiB)", "peak_memory_bytes", ".3g", 2**30)


def with_added(rows: Sequence[Row]) -> list[Row]:
    """Rows with the time that their step takes beyond one GPU alone in the same setting.

    If one GPU alone was measured several times, the last time before the row counts.
    """

    def setting(row: Row) -> str:
        return f"{group_key(row, SETTING)} {'+graph' in row.variant}"

    alone = {setting(row): row for row in reversed(rows) if row.status == "ok" and row.variant.startswith("alone")}
    found = []
    for row in rows:
        base = alone.get(setting(row))
        if row.status == "ok" and row.variant.startswith("alone"):
            alone[setting(row)] = row
        elif row.status == "ok" and base is not None:
            base_ms = base.metrics["step_ms"]["p50"]
            added = row.metrics["step_ms"]["p50"] - base_ms
            row = replace(row, metrics={**row.metrics, "added_ms": added, "added": added / base_ms})
        found.append(row)
    return found


DDP = View(
    keys=(*SETTING, "variant", "nccl_max_ctas", "copy_engines"),
    columns=(*_STEP, *_ADDED, _PEAK, *STREAMS),
    derive=with_added,
)
BUCKET_SIZE = View(
    keys=(*SETTING, "cuda_graph", "bucket_size_mb"),
    columns=(
        *_STEP,
        Column("spread of ranks (ms)", "spread_ms", ".2g"),
        *_ADDED,
        _PREDICTED,
        Column("planner's optimum (MiB)", "predicted.best_mb", ".3g"),
        Column("buckets", "buckets", "d"),
        _PEAK,
    ),
    plots=(
        Plot(name="added", y=_ADDED[0], x="bucket_size_mb", lines=("size", "compile", "cuda_graph"), log="x",
             beside=_PREDICTED),
    ),
    derive=with_added,
)  # fmt: skip
