"""The case `bucket-size`: the time that buckets of gradients add to a step of one GPU alone, by bucket size.

This is the handout's ddp_bucketed_benchmarking: the case `ddp` with one strategy, in turns, beside the planner's
prediction for each size from the times of all-reduces.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.checks import require
from ...machine.hardware import gpu_name, select_device
from ...parallel.ddp import DDP
from ...planner.cards import fit_transfer
from ...planner.communication import all_reduce_cost, best_bucket_bytes, bucket_overhead
from ...planner.rows import card_by_name, gradient_bytes_of, naming, transfer_points
from ...planner.working import MIB
from ...training.loop import Trainer
from ..case import swept
from ..row import Row, read_rows
from ..workload import random_run
from .ddp import ALONE, DDPBench, strategies_case

_BEST = "bucketed:best"


@dataclass(frozen=True, kw_only=True)
class BucketBench(DDPBench):
    """A bucket size, or one GPU alone; otherwise as in the case `ddp`."""

    variant: str = swept(
        ALONE,
        *(f"bucketed:{size}" for size in (1, 10, 100, 1000)),
        _BEST,
        quick=(ALONE, "bucketed:0.01", "bucketed:0.1"),
    )
    """alone, bucketed:BUCKET_MB, or bucketed:best (the planner's optimum); any of them with +graph."""
    compile: bool = swept(False, sweep=(False, True))
    rounds: int = swept(3, quick=2)
    rows: str = swept("", beside="all-reduce.jsonl")
    """Row file of all-reduces to which the prediction is fitted (default: all-reduce.jsonl beside the rows if it has
    rows of this many processes, otherwise the planner's numbers for the card)."""

    case = "bucket-size"
    options = ("graph",)

    def __post_init__(self) -> None:
        if self.rows:
            self.transfer_cost()  # refuse a useless file before measuring
        if self.variant.partition("+")[0] == _BEST:
            cost = self.transfer_cost()
            without = f"without rows of {self.devices} processes' all-reduces (cs336 bench all-reduce) and a known card"
            require(cost is not None, "variant", self.variant, f"bucketed:BUCKET_MB {without}")
            assert cost is not None
            overhead_s, bandwidth = cost
            # If calls have no overhead, the best bucket has 0 bytes: one bucket per gradient.
            size = max(best_bucket_bytes(self._gradient_bytes(), bandwidth, overhead_s) / MIB, 1e-3)
            object.__setattr__(self, "variant", self.variant.replace(_BEST, f"bucketed:{size:.3f}"))
        super().__post_init__()
        is_one = self.is_alone or self.variant.startswith("bucketed:")
        require(is_one, "variant", self.variant, "alone, bucketed:BUCKET_MB or bucketed:best")

    @property
    def bucket_size_mb(self) -> float | None:
        """Bucket size in 2^20 bytes; None for one GPU alone."""
        return None if self.is_alone else self.run_config().parallel.bucket_size_mb

    def transfer_cost(self) -> tuple[float, float] | None:
        """Overhead in s and bandwidth in bytes/s of an all-reduce over these processes; None if unknown.

        Raises ValueError or FileNotFoundError naming the given row file if it lacks them.
        """
        kind = select_device(self.device).type
        if self.rows:
            backend = "nccl" if kind == "cuda" else "gloo"
            rows = [row for row in read_rows(Path(self.rows)) if row.config.get("backend") == backend]
            with naming(f"rows is {self.rows!r}"):
                return fit_transfer(*transfer_points(rows, self.devices))
        card = card_by_name(gpu_name() or "") if kind == "cuda" else None
        return None if card is None or self.devices == 1 else all_reduce_cost(card, self.devices)

    def look(self, is_first: bool, trainer: Trainer) -> dict[str, Any]:
        return {"buckets": len(trainer.strategy.buckets)} if isinstance(trainer.strategy, DDP) else {}

    def row(self, metrics: dict[str, Any], **ran: Any) -> Row:
        ran = {"bucket_size_mb": self.bucket_size_mb, "cuda_graph": self.run_config().train.cuda_graph}
        return super().row(metrics | self.predicted(), **ran)

    def predicted(self) -> dict[str, Any]:
        """The planner's prediction for this size: time added, and the best size; {} if the cost is unknown."""
        cost, size = self.transfer_cost(), self.bucket_size_mb
        if cost is None or size is None:
            return {}
        overhead_s, bandwidth = cost
        nbytes = self._gradient_bytes()
        added_s = bucket_overhead(nbytes, bandwidth, overhead_s, size * MIB)
        best = best_bucket_bytes(nbytes, bandwidth, overhead_s)
        return {"predicted": {"added_ms": added_s * 1e3, "best_mb": best / MIB, "overhead_s": overhead_s,
                              "bytes_per_s": bandwidth}}  # fmt: skip

    def _gradient_bytes(self) -> float:
        return float(gradient_bytes_of(random_run(self.model, precision=self.precision).to_dict()))


CASE = strategies_case(BucketBench)
