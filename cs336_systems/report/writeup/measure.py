"""Measuring what the report shows: the commands of all problems, one after the other, as far as rows are missing."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...machine.console import ended_in_order, no_interrupts_inherited, say
from ...machine.hardware import gpu_count, gpu_name
from .build import find_rows
from .commands import not_measured
from .problem import Exhibit, Problem
from .problems import PROBLEMS

_HALF = ".part"


def check_gpu() -> None:
    """Raise ValueError where there is no GPU: what the problems ask for would take a CPU days."""
    if gpu_count() == 0:
        raise ValueError("measure is true: it needs a CUDA GPU; without it rows that are there will do")


def measure_missing(results: Path, problems: Sequence[Problem] = PROBLEMS) -> list[str]:
    """Measure what a folder and those below have no rows of yet on this kind of GPU.

    Returns the commands that did not succeed, which keep no other from running. Raises ValueError where there is no
    GPU, and as `find_rows` does.
    """
    check_gpu()
    results.mkdir(parents=True, exist_ok=True)
    find_rows(results)  # rows that cannot be read are refused now, not hours later
    failed = []
    exhibits = [each for problem in problems for each in problem.exhibits]
    commands = {command: each for each in exhibits for command in each.commands}
    for number, (command, exhibit) in enumerate(commands.items(), start=1):
        # A profile has a folder of its own, whose name says what was asked for.
        done = results / exhibit.case / "-".join(re.findall(r"[\w.]+", command.partition("--")[2]))
        half = done.with_name(f"{done.name}{_HALF}")
        if command.startswith("bench "):  # which knows what its row files have already
            more = ["--resume", "--out", str(results)]
        elif done.exists() or _has_all(results, exhibit, command):
            continue
        else:
            shutil.rmtree(half, ignore_errors=True)  # what an interrupt has left
            more = ["--out", str(half)]
        words = [*shlex.split(command), *more]
        say(f"{number} of {len(commands)}: cs336 {shlex.join(words)}")
        if run_alone([sys.executable, "-m", "cs336_systems", *words]) != 0:
            failed.append(f"cs336 {command}")
        elif half.exists():
            half.rename(done)
    return failed


def run_alone(command: Sequence[str]) -> int:
    """Run a command and return its exit code. Whatever signal ends this process ends the command first, by SIGTERM.

    A terminal sends Ctrl-C to both. Here only this process gets it, so that only one of them says it was interrupted.
    """
    with ended_in_order():
        with no_interrupts_inherited():
            process = subprocess.Popen(command)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise


def _has_all(results: Path, exhibit: Exhibit, command: str) -> bool:
    """Whether there are rows of all settings that a profile's command names."""
    rows = [
        row
        for file in find_rows(results).get(exhibit.case, [])
        for row in file.rows
        if not any(part.endswith(_HALF) for part in file.path.parts)
        and (row.env.get("gpu"), row.status == "error") == (gpu_name(), False)
    ]
    return bool(rows) and command not in not_measured(exhibit, rows)
