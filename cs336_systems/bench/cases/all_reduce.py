"""The case `all-reduce`: the time of collectives by size, number of ranks and backend.

This is the handout's distributed_communication_single_node, with three more collectives that strategies use. The
planner fits its cost of a transfer to these rows (`cs336 plan ddp-overhead --rows`). gloo implements a reduce-scatter
as an all-reduce of which each rank keeps its part.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ...config.checks import check_types, require, require_at_least
from ...machine.hardware import gpu_count
from ..case import Case, row_config, swept
from ..instruments.collectives import measure_collective
from ..outcome import free_memory, measured
from ..ranks import launched
from ..row import Row

_ALWAYS = 6  # the handout asks for this many gloo processes on any machine


@dataclass(frozen=True, kw_only=True)
class CollectiveBench:
    """A collective of float32 numbers: its size, the number of processes on this machine, and the backend."""

    collective: Literal["all-reduce", "reduce-scatter", "all-gather", "broadcast"] = swept(
        "all-reduce", "reduce-scatter", "all-gather", "broadcast"
    )
    """Collective to measure."""
    backend: Literal["gloo", "nccl"] = swept("gloo", "nccl", quick="gloo")
    """gloo between CPUs, nccl between GPUs; without enough GPUs nccl is left out."""
    world_size: int = swept(2, 4, 6, 8, quick=2)
    """Number of processes; with gloo, more than 6 only if each has a core."""
    bytes: int = swept(10**6, 10**7, 10**8, 10**9, quick=(10**4, 10**6))
    """Size of the whole buffer."""
    warmup: int = swept(5, quick=1)
    """Maximum number of calls before the measured ones."""
    calls: int = swept(100, quick=5)
    """Maximum number of measured calls."""
    budget_s: float = swept(2.0, quick=1.0)
    """Seconds for warm-up and calls together; slow collectives get fewer calls, but at least 3."""

    def __post_init__(self) -> None:
        check_types(self, "")
        require(2 <= self.world_size <= 1024, "world_size", self.world_size, "2 to 1024")
        accepted = "a multiple of 4 above 0, because a number has 4 bytes"
        require(self.bytes % 4 == 0 and self.bytes > 0, "bytes", self.bytes, accepted)
        require_at_least(self, "", 1, "bytes", "warmup", "calls")
        require(0 < self.budget_s <= 300, "budget_s", self.budget_s, "above 0 and at most 300")

    @property
    def devices(self) -> int:
        return self.world_size

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def check_machine(config: CollectiveBench) -> None:
    """Raise ValueError if this machine lacks a GPU per process, or with many gloo processes a core for each."""
    cores = os.cpu_count() or 1
    most, why = (gpu_count(), "a GPU each") if config.backend == "nccl" else (max(_ALWAYS, cores), f"{cores} cores")
    accepted = f"at most {most} here with backend {config.backend!r}, {why}"
    require(config.world_size <= most, "world_size", config.world_size, accepted)


def measure_on_rank(
    configs: Sequence[CollectiveBench], device: torch.device, at_work: Callable[[CollectiveBench], None]
) -> Iterator[Row]:
    """Measure the configurations one after the other, together with the other ranks."""
    for config in configs:
        at_work(config)
        ran, metrics = measure_collective(
            config.collective, config.bytes, device, config.warmup, config.calls, config.budget_s
        )
        free_memory()
        yield measured(CASE.name, CASE.variant(config), row_config(config), ran, metrics)


CASE = Case(
    name="all-reduce",
    config=CollectiveBench,
    variant=lambda config: f"{config.collective} {config.backend} {config.world_size}",
    rows=launched,
    measure_on_rank=measure_on_rank,
    together=("collective", "bytes"),
    check=check_machine,
)
