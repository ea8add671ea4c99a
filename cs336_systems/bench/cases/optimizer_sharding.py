"""The case `optimizer-sharding`: a step's memory with and without sharded optimizer state, part by part.

This is the handout's optimizer_state_sharding_accounting: memory after initialisation, before and after the optimizer
step, and the time of an iteration; beside it, what the planner predicts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...config.checks import require, require_at_least
from ..case import Case, swept
from ..instruments.memory_moments import rows_of_memory
from ..ranks import launched
from ..row import Row
from .ddp import DDPBench, name_of


@dataclass(frozen=True, kw_only=True)
class MemoryBench(DDPBench):
    """A strategy whose memory is measured; otherwise as in the case `ddp`."""

    variant: str = swept("overlap", "overlap+zero1", quick=("overlap", "overlap+zero1"))
    """alone, or STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients are sent in it)."""
    compile: bool = swept(False, sweep=(False, True))
    """Compile the blocks."""
    warmup: int = swept(3, quick=2)
    """Steps before the one whose memory is measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Buckets are laid out anew after the first step, and allocated when the second begins.
        require_at_least(self, "", 2, "warmup")
        on_gpu = self.device == "cuda"
        require(on_gpu or not self.compile, "compile", self.compile, "false on a CPU, where operators are counted")
        require(self.rounds == 1, "rounds", self.rounds, "1")
        require(not self.built_once, "built_once", self.built_once, "false, since memory is what is measured")
        require(self.traces == "", "traces", self.traces, "left out, see the cases ddp and overlap-trace")

    @property
    def options(self) -> tuple[str, ...]:
        """What may follow the strategy; not +graph, whose memory is a separate pool and which calls no hooks."""
        return ("zero1", "bf16")


def measure_on_rank(
    configs: Sequence[MemoryBench], device: torch.device, at_work: Callable[[MemoryBench], None]
) -> Iterator[Row]:
    """Measure each variant together with the other ranks."""
    return rows_of_memory("optimizer-sharding", configs, device, at_work)


CASE = Case(
    name="optimizer-sharding",
    about="Memory (part by part) and time of a step with and without sharded optimizer state.",
    module=__name__,
    config=MemoryBench,
    variant=name_of,
    measure=launched(__name__),
    together=("variant", "compile"),
)
