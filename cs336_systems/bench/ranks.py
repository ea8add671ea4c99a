"""Cases that several ranks measure together: one launch starts the ranks, all measure, and rank 0 writes the rows.

The module of such a case has a function `measure_on_rank` (see `OnRank`). Its configurations have `devices`, the number
of processes, and `device`, cpu or cuda. They may have the fields in `_GROUP_OPTIONS`, the same throughout a launch.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..parallel import comm
from ..training.launch import one_of_several, run_processes, use_device_of_rank
from .case import is_of, is_of_fewer_rounds, row_config
from .outcome import current_gpu_state, failed, with_gpu_states
from .row import Row, append_row, read_rows
from .worker import SCRATCH

OnRank = Callable[[Sequence[Any], torch.device, Callable[[Any], None]], Iterator[Row]]
"""Yields rows of configurations, the same on all ranks; tells its last argument which configuration is at work."""
_PROGRAM = ["-m", "cs336_systems.bench.ranks"]
_GROUP_OPTIONS = ("step_timeout_s", "nccl_max_ctas")
_CONFIGS, _ROWS, _AT_WORK = "configs.json", "rows.jsonl", "at_work"


def launched(module: str) -> Callable[[Sequence[Any]], Iterator[Row]]:
    """Make the `measure` of this module's case: one launch of processes measures all configurations.

    If a configuration ends the launch, that is a row too, and another launch measures the others. Before the last round
    there are rows of the rounds so far (`is_of_fewer_rounds`).
    """

    def measure(configs: Sequence[Any]) -> Iterator[Row]:
        case = import_module(module).CASE
        left = list(configs)
        while left:
            with tempfile.TemporaryDirectory(prefix="cs336-", dir=os.environ.get(SCRATCH)) as name:
                folder, asked = Path(name), list(left)
                (folder / _CONFIGS).write_text(json.dumps([asdict(config) for config in asked]))
                try:
                    for row in _launch(module, asked[0].devices, folder):
                        if not any(is_of_fewer_rounds(row, config) for config in left):
                            left.remove(next(config for config in left if is_of(row, config)))
                        yield row
                    return
                except Exception as error:  # whatever the first rank to fail has raised
                    if not left:  # only the end of the launch failed
                        return
                    at_work = folder / _AT_WORK
                    culprit = asked[int(at_work.read_text())] if at_work.exists() else left[0]
                    culprit = culprit if culprit in left else left[0]
                    left.remove(culprit)
                    yield failed(case.name, case.variant(culprit), row_config(culprit), error)

    return measure


def _launch(module: str, devices: int, folder: Path) -> Iterator[Row]:
    """Rows as rank 0 writes them. Raises what the first process to fail raised."""
    rows = folder / _ROWS
    rows.touch()
    seen = 0
    with ThreadPoolExecutor(1) as pool:
        launch = pool.submit(run_processes, [*_PROGRAM, module, str(folder)], devices, folder)
        while True:
            is_over = launch.done()  # asked before reading, so that the last row is read
            new = read_rows(rows)[seen:]
            seen += len(new)
            yield from new
            if is_over:
                launch.result()
                return
            wait([launch], timeout=0.2)


def _asked_for(module: str, folder: Path) -> list[Any]:
    """The configurations that a folder asks for."""
    case = import_module(module).CASE
    return [case.config(**fields) for fields in json.loads((folder / _CONFIGS).read_text())]


def meet_and_write_rows(module: str, folder: Path) -> None:
    """The work of each process: meet the others, and measure with them what a folder asks for."""
    first = _asked_for(module, folder)[0]
    device = use_device_of_rank(first.device)
    options = {name: getattr(first, name) for name in _GROUP_OPTIONS if hasattr(first, name)}
    with comm.process_group(device, **options):
        write_rows(module, folder, device)


def write_rows(module: str, folder: Path, device: torch.device) -> None:
    """Measure what a folder asks for on this rank's device, together with the others; rank 0 writes rows there."""
    configs = _asked_for(module, folder)

    def at_work(config: Any) -> None:
        if comm.rank() == 0:
            (folder / _AT_WORK).write_text(str(configs.index(config)))

    before = current_gpu_state()
    for row in import_module(module).measure_on_rank(configs, device, at_work):
        after = current_gpu_state()
        if comm.rank() == 0:
            append_row(folder / _ROWS, with_gpu_states(row, before, after))
        before = after


def main() -> None:
    """Measure: `MODULE FOLDER PARENT`, the module of a case and the folder with what is asked for."""
    module, folder, parent = sys.argv[1:]
    with one_of_several(parent):
        meet_and_write_rows(module, Path(folder))


if __name__ == "__main__":
    main()
