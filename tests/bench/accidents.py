"""Cases for the runner's tests: a configuration says how its measurement fails.

`together` has the configurations of one number in one call.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cs336_systems.bench.case import Case, swept
from cs336_systems.bench.outcome import each
from cs336_systems.bench.row import Row


@dataclass(frozen=True, kw_only=True)
class Accident:
    kind: str = swept("none", "oom", "raises", sweep=("none", "oom", "raises", "is killed"))
    """How the measurement ends."""
    number: int = swept(1)
    """Any number, to tell configurations apart."""
    folder: str = swept("")
    """Folder for a file with the process IDs."""

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"number is {self.number}: it must be at least 1")


def measure(config: Accident) -> tuple[dict, dict]:
    if config.folder:
        with open(Path(config.folder) / "started", "a") as file:
            file.write(f"{config.kind} {config.number} {os.getpid()}\n")
    if config.kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has\nmore to say")
    if config.kind == "raises":
        raise RuntimeError("the dog ate it\nand more")
    if config.kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.kind == "exits":
        os._exit(3)
    if config.kind == "hangs":
        time.sleep(1000)
    if config.kind == "is another":
        return {"kind": "none"}, {}
    return {"kind": config.kind, "built": True}, {"process": os.getpid(), "time_ms": {"p50": 1.0}}


def variant(config: Accident) -> str:
    return config.kind


def measure_all(case: Case, configs: Sequence[Accident]) -> Iterator[Row]:
    for config in configs:
        if config.kind == "raises beside":
            raise ValueError("nobody has caught this")
        yield from each(measure)(case, [config])


def measure_together(case: Case, configs: Sequence[Accident]) -> Iterator[Row]:
    for row in list(measure_all(case, configs)):  # sends no row before all are measured
        yield replace(row, case="together", metrics={**row.metrics, "together": len(configs)})


CASE = Case(name="accidents", config=Accident, variant=variant, rows=measure_all)
TOGETHER = replace(CASE, name="together", rows=measure_together, together=("kind",))
PRESETS = {TOGETHER.name: TOGETHER}
