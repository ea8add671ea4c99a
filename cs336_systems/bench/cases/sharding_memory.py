"""A step's memory, part by part, and its time: the cases `optimizer-sharding` and `fsdp-accounting`.

- `optimizer-sharding`, the handout's optimizer_state_sharding_accounting: memory after initialisation, before and after
  the optimizer step, with and without sharded optimizer state; beside it the planner's prediction.
- `fsdp-accounting`, the handout's fsdp_accounting: the same for fully sharded training, and for each all-gather of a
  profiled step, how long before its layer needs the weights it ends, or how long the layer waits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...config.checks import require, require_at_least
from ...parallel import comm
from ...parallel.ranks import alone
from ...planner.memory import part_bytes
from ...planner.rows import training_job
from ...training.loop import Trainer
from ..case import row_config, swept
from ..instruments.gathers import gathers_of
from ..instruments.memory_moments import fullest, measure_memory
from ..instruments.streams import profile_step
from ..outcome import free_memory
from ..row import Row
from .ddp import DDPBench, strategies_case


@dataclass(frozen=True, kw_only=True)
class OptimizerShardingBench(DDPBench):
    """A strategy whose memory is measured; otherwise as in the case `ddp`."""

    variant: str = swept("overlap", "overlap+zero1", quick=("overlap", "overlap+zero1"))
    """alone, or STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients are sent in it)."""
    compile: bool = swept(False, sweep=(False, True))
    warmup: int = swept(3, quick=2)
    """Steps before the one whose memory is measured."""

    case = "optimizer-sharding"
    # Without +graph, whose memory is a separate pool and whose step calls no hooks; without +zero2, as in the handout.
    options = ("zero1", "bf16")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Buckets are laid out anew after the first step, and allocated when the second begins.
        require_at_least(self, "", 2, "warmup")
        on_gpu = self.device == "cuda"
        require(on_gpu or not self.compile, "compile", self.compile, "false on a CPU, where operators are counted")
        require(self.rounds == 1, "rounds", self.rounds, "1")
        require(not self.built_once, "built_once", self.built_once, "false, because memory is measured")
        require(self.traces == "", "traces", self.traces, "left out, see the cases ddp and overlap-trace")


@dataclass(frozen=True, kw_only=True)
class FSDPBench(OptimizerShardingBench):
    """A strategy whose memory is measured, and the gathers of `fsdp`."""

    variant: str = swept("overlap", "overlap+zero1", "fsdp", quick=("overlap", "fsdp"))

    case = "fsdp-accounting"


def measure_on_rank(
    configs: Sequence[OptimizerShardingBench], device: torch.device, at_work: Callable[[OptimizerShardingBench], None]
) -> Iterator[Row]:
    """Yield a row per configuration, the same on all ranks, with the planner's prediction if there is one."""
    is_first = comm.rank() == 0  # asked here, because inside `alone` every rank is 0
    for config in configs:
        at_work(config)
        free_memory()
        follow = isinstance(config, FSDPBench) and config.variant.partition("+")[0] == "fsdp"

        def look(trainer: Trainer, follow: bool = follow) -> dict[str, Any]:
            events = profile_step(trainer.train_step, is_first, trainer.device) if follow else []
            return gathers_of(events) if follow and is_first else {}

        with alone() if config.is_alone else nullcontext():
            found, seen = measure_memory(config, device, look)
        ranks = comm.all_gather_objects((found, seen), "the measurements")
        metrics = fullest([metrics for metrics, _ in ranks]) | ranks[0][1]
        with suppress(ValueError):  # a strategy or an option that the planner does not know
            settings = row_config(config) | {"run": config.run_config().to_dict()}
            predicted = part_bytes(training_job(config.case, config.variant, settings))
            if device.type != "cuda":
                del predicted["peak"]  # mostly a GPU's workspaces
            metrics["predicted"] = predicted
        yield config.row(metrics)


CASE = strategies_case(OptimizerShardingBench, measure_on_rank)
FSDP_ACCOUNTING = strategies_case(FSDPBench, measure_on_rank)
PRESETS = {FSDP_ACCOUNTING.name: FSDP_ACCOUNTING}
