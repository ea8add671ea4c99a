"""The case `overlap-trace`: when one step computes and when it communicates, for two strategies.

This is the handout's ddp_overlap_individual_parameters_benchmarking, part (b). The steps are as in the case `ddp`; one
more is profiled on the first rank, and drawn.
"""

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from ...config.checks import require
from ...training.loop import Trainer
from ..case import swept
from ..instruments.streams import record_step, totals
from . import ddp


@dataclass(frozen=True, kw_only=True)
class OverlapTrace(ddp.DDPBench):
    """A strategy whose step is traced; otherwise as in the case `ddp`."""

    variant: str = swept("naive", "overlap", quick=("naive", "overlap"))
    """STRATEGY[:BUCKET_MB], with +zero1 (sharded optimizer), +bf16 (gradients are sent in it), +graph."""
    compile: bool = swept(False, sweep=(False, True))
    traces: str = swept("runs/bench/overlap-trace", beside="overlap-trace")
    """Folder for files with the streams of each variant's step, from which the picture and the page are drawn
    (default: overlap-trace, beside the rows)."""
    profiler: Literal["torch", "nsys"] = swept("torch")
    """torch; nsys: leave the step to Nsight Systems, which records it if it runs the command."""

    case = "overlap-trace"
    every_round = False  # the step is traced in the last one

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.traces != "", "traces", self.traces, "a folder")
        on_gpu = self.device == "cuda"
        require(self.profiler == "torch" or on_gpu, "profiler", self.profiler, f"torch with device {self.device!r}")

    def look(self, is_first: bool, trainer: Trainer) -> dict[str, Any]:
        """The times of the step's streams, and the file with everything; nothing with nsys."""
        if self.profiler == "nsys":
            _step_for_nsys(trainer, is_first)
            return {}
        stem = re.sub(r"\W+", "-", f"{self.size} {self.context_length} {ddp.name_of(self)}")
        file = Path(self.traces, f"{stem}.json")
        streams = record_step(trainer.train_step, is_first, trainer.device, file, named=True)
        return totals(streams) | {"streams": str(file)} if is_first else {}


DEFAULTS = {field.name: field.default for field in fields(OverlapTrace)}


def _step_for_nsys(trainer: Trainer, is_first: bool) -> None:
    """Do two steps; mark the second for Nsight Systems, with operators and transfers as ranges."""
    trainer.train_step()
    if not is_first:
        trainer.train_step()
        return
    torch.cuda.synchronize(trainer.device)
    torch.cuda.profiler.start()
    with torch.autograd.profiler.emit_nvtx():
        trainer.train_step()
    torch.cuda.synchronize(trainer.device)
    torch.cuda.profiler.stop()


CASE = ddp.strategies_case(OverlapTrace, __name__)
