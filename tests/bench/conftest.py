"""Fixtures for the tests of several cases."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench import ranks, runner
from cs336_systems.bench.case import Case, groups
from cs336_systems.bench.row import Row, append_row
from tests.distributed import run_ranks

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(cs336: Bench) -> Bench:
    """Runs `cs336 bench` with the given words; returns exit code, stdout and stderr."""
    return functools.partial(cs336, "bench")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process: starting another takes seconds and escapes monkeypatching."""

    def run_case(case: Case, configs: Sequence[Any], path: Path, **_: Any) -> Iterator[Row]:
        for group in groups(case, configs):
            for row in case.measure(group):
                append_row(path, row)
                yield row

    monkeypatch.setattr(runner, "run_case", run_case)


@pytest.fixture
def ranks_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks of a case with PyTorch loaded, which is faster than a launch."""

    def run_processes(program: list[str], count: int, folder: Path) -> None:
        *_, module, place = program
        run_ranks(write_as_one_of_them, count, module, place)

    monkeypatch.setattr(ranks, "run_processes", run_processes)


def write_as_one_of_them(module: str, folder: str) -> None:
    ranks.write_rows(module, Path(folder), torch.device("cpu"))


@pytest.fixture(autouse=True)
def _fast_reports(unrendered: None) -> None:
    """Drawing takes longer than measuring these sizes."""
