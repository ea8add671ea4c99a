"""Measuring what the report shows: the commands of all problems, one after the other; a second time what is missing."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...console import ended_in_order, say
from ...hardware import gpu_count
from .problem import Problem
from .problems import PROBLEMS


def check_gpu() -> None:
    """Raise ValueError where there is no GPU: what the problems ask for would take a CPU days."""
    if gpu_count() == 0:
        raise ValueError("measure is True: it needs a CUDA GPU; without it rows that are there will do")


def measure_missing(results: Path, problems: Sequence[Problem] = PROBLEMS) -> list[str]:
    """Measure what has no rows in a folder yet; the commands that did not succeed, which keep no other from running.

    Raises ValueError where there is no GPU.
    """
    check_gpu()
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    exhibits = [each for problem in problems for each in problem.exhibits]
    for command, case in {command: each.case for each in exhibits for command in each.commands}.items():
        # A profile has a folder of its own, whose name says what was asked for.
        done = results / case / "-".join(re.findall(r"[\w.]+", command.partition("--")[2]))
        half = done.with_name(f"{done.name}.part")
        if command.startswith("bench "):  # which knows what its row file has already
            more = ["--resume", "--out", str(results)]
        elif done.exists():
            continue
        else:
            shutil.rmtree(half, ignore_errors=True)  # what an interrupt has left
            more = ["--out", str(half)]
        words = [*shlex.split(command), *more]
        say(f"cs336 {shlex.join(words)}")
        with ended_in_order():  # with what it has started
            code = subprocess.run([sys.executable, "-m", "cs336_systems", *words], check=False).returncode
        if code != 0:
            failed.append(f"cs336 {command}")
        elif half.exists():
            half.rename(done)
    return failed
