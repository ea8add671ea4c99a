"""The case `fsdp-accounting`: how much memory fully sharded training saves, and whether its gathers are in time.

This is the handout's fsdp_accounting: memory part by part as in `optimizer-sharding`, beside what the planner predicts;
and for each all-gather of a profiled step, how long before its layer needs the weights it is over, or how long the
layer has to wait.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...training.loop import Trainer
from ..case import Case, swept
from ..instruments.gathers import gathers_of, summary
from ..instruments.memory_moments import rows_of_memory
from ..instruments.streams import profile_step
from ..ranks import launched
from ..row import Row
from .ddp import name_of
from .optimizer_sharding import MemoryBench


@dataclass(frozen=True, kw_only=True)
class FSDPBench(MemoryBench):
    """As `optimizer-sharding`, for other strategies."""

    variant: str = swept("overlap", "overlap+zero1", "fsdp", quick=("overlap", "fsdp"))
    """alone, or STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients are sent in it)."""


def measure_on_rank(
    configs: Sequence[FSDPBench], device: torch.device, at_work: Callable[[FSDPBench], None]
) -> Iterator[Row]:
    """Measure each variant together with the other ranks, and follow the gathers of `fsdp`."""
    return rows_of_memory("fsdp-accounting", configs, device, at_work, _follow_gathers)


def _follow_gathers(config: FSDPBench, is_first: bool, trainer: Trainer) -> dict[str, Any]:
    if not config.variant.startswith("fsdp"):
        return {}
    events = profile_step(trainer.train_step, is_first, trainer.device)
    return summary(gathers_of(events)) if is_first else {}


CASE = Case(
    name="fsdp-accounting",
    about="Memory that FSDP saves, part by part, and whether each of its gathers is over in time.",
    module=__name__,
    config=FSDPBench,
    variant=name_of,
    measure=launched(__name__),
    together=("variant", "compile"),
)
