"""Measuring the rows that the write-up lacks, without a GPU: commands are recorded in place of running them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.assignment import measure
from cs336_systems.cli.report import make_report

MEASURING = """
import sys
from cs336_systems.assignment.measure import run_alone
work = "import time; print('at work', flush=True); time.sleep(600)"
try:
    run_alone([sys.executable, "-c", work])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words after cs336 of each command; those of a case called `failing` fail."""
    found: list[list[str]] = []

    def run(words: Sequence[str]) -> int:
        assert list(words[:3]) == [sys.executable, "-m", "cs336_systems"]
        found.append(list(words[3:]))
        return int("failing" in words)

    monkeypatch.setattr(measure, "run_alone", run)
    monkeypatch.setattr(measure, "gpu_count", lambda: 1)
    return found


def one_after_the_other(*answers: Sequence[str]) -> Callable[[], Sequence[str]]:
    """The missing commands of one build after the other; the last is repeated."""
    left = list(answers)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=r"^measure is true: .*GPU"):
        make_report(["writeup", "--measure", "--results", str(tmp_path / "rows"), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_commands_run_once_until_there_is_no_new_one(tmp_path: Path, ran: list[list[str]]) -> None:
    missing = one_after_the_other(
        ["cs336 bench a", "cs336 bench b", "cs336 bench a"], ["cs336 bench b", "cs336 bench c"], ["cs336 bench b"]
    )
    assert measure.measure_missing(tmp_path / "rows", missing) == []
    assert [words[1] for words in ran] == ["a", "b", "c"]
    assert (tmp_path / "rows").is_dir()


def test_a_failed_command_is_returned_and_not_tried_again(tmp_path: Path, ran: list[list[str]]) -> None:
    command = "cs336 bench failing --size xl"
    assert measure.measure_missing(tmp_path, lambda: [command, "cs336 bench a"]) == [command]
    assert [words[1] for words in ran] == ["failing", "a"]


def test_an_interrupted_command_is_continued_even_if_it_left_rows(
    tmp_path: Path, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(words: Sequence[str]) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure, "run_alone", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure.measure_missing(tmp_path, lambda: ["cs336 bench a"])
    assert measure.measure_missing(tmp_path, lambda: ["cs336 bench b"]) == []
    assert measure.measure_missing(tmp_path, lambda: []) == []
    assert [words[1] for words in ran] == ["a", "b"]


def test_rows_go_below_the_folder_and_profiles_have_one_of_their_own(tmp_path: Path, ran: list[list[str]]) -> None:
    commands = ["cs336 bench ddp --variant 'a b'", "cs336 profile memory --size 2.7B", "cs336 profile memory --size xl"]
    measure.measure_missing(tmp_path, lambda: commands)
    bench, *profiles = ran
    assert bench == ["bench", "ddp", "--variant", "a b", "--resume", "--out", str(tmp_path)]
    folders = [Path(words[-1]) for words in profiles]
    assert [words[:-1] for words in profiles] == [
        ["profile", "memory", "--size", size, "--out"] for size in ("2.7B", "xl")
    ]
    assert {folder.parent for folder in folders} == {tmp_path}
    assert folders[0] != folders[1]


@pytest.mark.parametrize("number, code, said", [(signal.SIGINT, 0, "interrupted\n"), (signal.SIGTERM, 143, "")])
def test_a_signal_ends_the_command_first_and_is_reported_once(number: signal.Signals, code: int, said: str) -> None:
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", MEASURING], start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)  # waits for the command too, which holds the pipes
    assert (process.returncode, out, err) == (code, said, "")


def test_the_exit_code_is_that_of_the_command() -> None:
    assert measure.run_alone([sys.executable, "-c", "raise SystemExit(3)"]) == 3
