"""Cases that are measured by several processes together: what they are told, and how they are started and heard.

What each process does is in `ranks.py`. One launch measures all configurations of a call, so that they have the same
machine; where one of them ends it, the others are measured in another.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..training.launch import run_processes
from ..training.loop import Trainer
from .case import Row, read_rows
from .outcome import failed
from .sweep import as_json
from .worker import SCRATCH

_PROGRAM = ["-m", "cs336_systems.bench.ranks"]


class RanksBench:
    """What `ranks.py` asks of a configuration of such a case, a dataclass beside."""

    devices: int
    device: str
    warmup: int
    steps: int
    rounds = 1
    """How often the variants take turns, each built anew."""
    traces = ""
    """Folder for what ran when in one step of each variant, where there is one."""
    is_timed_by_call = False
    """Whether each step is timed by itself, from one wait for the device to the next, and not as one of many."""
    step_timeout_s = 120.0
    """How long a process waits for another."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sent."""
        return False

    def run_config(self) -> RunConfig:
        """The run whose steps are measured."""
        raise NotImplementedError

    def read_back(self, trainer: Trainer) -> dict[str, Any]:
        """Fields of the configuration, as what was built shows them."""
        return {}

    def derive(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Metrics that follow from those of all ranks."""
        return {}


def on_ranks(case: str, name_of: Callable[[Any], str]) -> Callable[[Sequence[Any]], Iterator[Row]]:
    """The `measure` of a case: a row each, in one launch of processes; what ends it is a row too."""

    def measure(configs: Sequence[Any]) -> Iterator[Row]:
        left = list(configs)
        while left:
            with tempfile.TemporaryDirectory(prefix="cs336-", dir=os.environ.get(SCRATCH)) as folder:
                place = Path(folder)
                (place / "configs.json").write_text(json.dumps([asdict(config) for config in left]))
                try:
                    for row in _launch(case, left[0].devices, place):
                        left.remove(next(config for config in left if name_of(config) == row.variant))
                        yield row
                    return
                except Exception as error:  # whatever the first rank to fail has raised
                    at_work = (place / "at_work").read_text() if (place / "at_work").exists() else ""
                    culprit = next((config for config in left if name_of(config) == at_work), left[0])
                    left.remove(culprit)
                    yield failed(case, name_of(culprit), as_json(culprit), error)

    return measure


def _launch(case: str, devices: int, folder: Path) -> Iterator[Row]:
    """Rows as rank 0 writes them. Raises what the first process to fail raised."""
    rows = folder / "rows.jsonl"
    rows.touch()
    seen = 0
    with ThreadPoolExecutor(1) as pool:
        launch = pool.submit(run_processes, [*_PROGRAM, case, str(folder)], devices, folder)
        while True:
            is_over = launch.done()  # asked before reading, so that the last row is read
            new = read_rows(rows)[seen:]
            seen += len(new)
            yield from new
            if is_over:
                launch.result()
                return
            wait([launch], timeout=0.2)
