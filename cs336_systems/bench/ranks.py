"""Cases that several ranks measure together: one launch starts the ranks, all measure, and rank 0 writes the rows.

Such a case has a `measure_on_rank`. Its configurations have `devices`, the number of processes, and `device`, cpu or
cuda. They may have the process group's options `step_timeout_s`, `nccl_max_ctas` and `copy_engines`, the same
throughout a launch.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..parallel import comm
from ..training.launch import CALL, run_processes, use_device_of_rank
from .case import Case, is_of, is_of_fewer_rounds, load_case, row_config
from .outcome import current_gpu_state, failed, with_gpu_states
from .row import Row, append_row, read_rows
from .worker import SCRATCH

_GROUP_OPTIONS = ("step_timeout_s", "nccl_max_ctas", "copy_engines")
_CONFIGS, _ROWS, _AT_WORK = "configs.json", "rows.jsonl", "at_work"


def launched(case: Case, configs: Sequence[Any]) -> Iterator[Row]:
    """The rows of a case with `measure_on_rank`: one launch measures all configurations.

    A configuration that ends the launch gets a row too, and another launch measures the rest. Before the last round
    there are rows of the rounds so far (`is_of_fewer_rounds`).
    """
    left = list(configs)
    while left:
        with tempfile.TemporaryDirectory(prefix="cs336-", dir=os.environ.get(SCRATCH)) as name:
            folder, asked = Path(name), list(left)
            (folder / _CONFIGS).write_text(json.dumps([asdict(config) for config in asked]))
            try:
                for row in _launch(case.place, asked[0].devices, folder):
                    if not any(is_of_fewer_rounds(row, config) for config in left):
                        left.remove(next(config for config in left if is_of(row, config)))
                    yield row
                return
            except Exception as error:  # whatever the first rank to fail has raised
                if not left:  # the failure came after the last row
                    return
                at_work = folder / _AT_WORK
                culprit = asked[int(at_work.read_text())] if at_work.exists() else left[0]
                culprit = culprit if culprit in left else left[0]
                left.remove(culprit)
                yield failed(case.name, case.variant(culprit), row_config(culprit), error)


def _launch(place: str, devices: int, folder: Path) -> Iterator[Row]:
    """Yield rows as rank 0 writes them. Raises what the first process to fail raised."""
    rows = folder / _ROWS
    rows.touch()
    seen = 0
    with ThreadPoolExecutor(1) as pool:
        program = [*CALL, f"{__name__}:measure_one_rank", place, str(folder)]
        launch = pool.submit(run_processes, program, devices, folder)
        while True:
            is_over = launch.done()  # asked before reading, so that the last row is read
            new = read_rows(rows)[seen:]
            seen += len(new)
            yield from new
            if is_over:
                launch.result()
                return
            wait([launch], timeout=0.2)


def read_configs(place: str, folder: Path) -> list[Any]:
    """The configurations to measure, as `launched` wrote them into the folder."""
    return [load_case(place).config(**fields) for fields in json.loads((folder / _CONFIGS).read_text())]


def write_rows(place: str, folder: Path, device: torch.device) -> None:
    """Measure the folder's configurations on this rank's device, together with the others; rank 0 writes the rows."""
    configs = read_configs(place, folder)

    def at_work(config: Any) -> None:
        if comm.rank() == 0:
            (folder / _AT_WORK).write_text(str(configs.index(config)))

    before = current_gpu_state()
    measure_on_rank = load_case(place).measure_on_rank
    assert measure_on_rank is not None
    for row in measure_on_rank(configs, device, at_work):
        after = current_gpu_state()
        if comm.rank() == 0:
            append_row(folder / _ROWS, with_gpu_states(row, before, after))
        before = after


def measure_one_rank(arguments: Sequence[str]) -> None:
    """Join the process group as one rank, and measure. Arguments: the case's place, the folder."""
    place, folder = arguments[0], Path(arguments[1])
    first = read_configs(place, folder)[0]
    device = use_device_of_rank(first.device)
    options = {name: getattr(first, name) for name in _GROUP_OPTIONS if hasattr(first, name)}
    with comm.process_group(device, **options):
        write_rows(place, folder, device)
