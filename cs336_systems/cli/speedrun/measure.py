"""Time some steps of a run in a separate process, so that a crash or a lack of memory takes down nothing else."""

import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ...bench.case import Case, row_config
from ...bench.outcome import failed, measured
from ...bench.ranks import launched
from ...bench.row import Row
from ...bench.turns import StepBench, measure_in_turns
from ...bench.worker import Worker, WorkerEndedError
from ...config.run import RunConfig
from .choice import Trial


@dataclass(frozen=True, kw_only=True)
class StepTimes(StepBench):
    """A run to time, on random weights and tokens."""

    name: str
    run: str
    """The configuration of the run, as JSON."""
    devices: int
    device: str
    """cpu or cuda."""
    warmup: int
    steps: int

    def run_config(self) -> RunConfig:
        return RunConfig.from_dict(json.loads(self.run))

    def row(self, metrics: dict[str, Any]) -> Row:
        return measured("speedrun", self.name, row_config(self), {}, metrics)


CASE = Case(
    name="speedrun",
    config=StepTimes,
    variant=lambda config: config.name,
    rows=launched,
    measure_on_rank=measure_in_turns,
)


_STEPS = {"cuda": (3, 10), "cpu": (1, 3)}
"""Warm-up steps and measured steps of a trial, by device."""


def trial_s(step_s: float, device: str) -> float:
    """Time of all steps of a trial, including one that all ranks start together."""
    return (sum(_STEPS[device]) + 1) * step_s


def time_trial(trial: Trial, run: RunConfig, device: str) -> Row:
    """Time a trial's run on `device` (cpu or cuda)."""
    warmup, steps = _STEPS[device]
    config = StepTimes(name=f"{trial.size}, {trial.kernel}", run=json.dumps(run.to_dict()), device=device,
                       devices=run.parallel.devices, warmup=warmup, steps=steps)  # fmt: skip
    try:
        with closing(Worker(CASE.place)) as worker:  # an interrupt ends it at once
            (row,) = worker.measure([config])
    except WorkerEndedError as error:
        return failed(CASE.name, config.name, row_config(config), error)
    return row
