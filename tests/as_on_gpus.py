"""Runs measurements for two GPUs to their end on a CPU: they return committed rows."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cs336_systems.bench import runner
from cs336_systems.bench.case import Case
from cs336_systems.bench.row import Row, append_row, read_rows
from cs336_systems.bench.workload import Workload
from cs336_systems.cli import profile as profile_command

RESULTS = Path(__file__).parents[1] / "results/h200"
run_case = runner.run_case
ROWS = {"kernels": "kernels.jsonl", "model": "model.jsonl", "ddp": "strategies/ddp.jsonl"}


def pretend() -> None:
    """Until the process ends: PyTorch sees two H200, `run_case` and `profile` are those of this module."""
    gpus = mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_name=lambda device=None: "NVIDIA H200",
        is_bf16_supported=lambda including_emulation=True: True,
    )
    gpus.start()
    runner.run_case = committed
    profile_command.profile = quick_profile(profile_command.profile, gpus)


def committed(case: Case, configs: Sequence[Any], path: Path, **options: Any) -> Iterator[Row]:
    """The committed rows of a case, in place of those of configurations that are valid on two GPUs."""
    assert configs
    assert all(config.device in ("auto", "cuda") for config in configs)
    for row in read_rows(RESULTS / ROWS[case.name]):
        append_row(path, row)
        yield row


def quick_profile(profile: Callable[[Sequence[str]], int], gpus: Any) -> Callable[[Sequence[str]], int]:
    """A profile of a tiny model on the CPU, in place of one of a workload that is valid on two GPUs."""

    def quick(arguments: Sequence[str]) -> int:
        kind, *workload, out_name, out = arguments
        given: dict[str, Any] = dict(zip(workload[::2], workload[1::2], strict=True))
        Workload(**{name.lstrip("-"): int(value) if value.isdigit() else value for name, value in given.items()})
        gpus.stop()
        try:
            with mock.patch.object(runner, "run_case", run_case):
                return profile([kind, "--quick", out_name, out])
        finally:
            gpus.start()

    return quick
