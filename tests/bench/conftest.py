"""What tests of several cases share."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cs336_systems.bench import runner
from cs336_systems.bench.case import Row, append_row
from cs336_systems.bench.sweep import Case, groups


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command measures here: a process of its own takes seconds, and nothing can be put in its place."""

    def run_case(case: Case, configs: Sequence[Any], path: Path, **_: Any) -> Iterator[Row]:
        for group in groups(case, configs):
            for row in case.measure(group):
                append_row(path, row)
                yield row

    monkeypatch.setattr(runner, "run_case", run_case)
