"""Measuring what the report shows: the commands of all problems, one after the other; a second time what is missing."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ...console import say
from ...hardware import gpu_count
from .problem import Problem
from .problems import PROBLEMS


def measure_missing(results: Path, problems: Sequence[Problem] = PROBLEMS) -> list[str]:
    """Measure what has no rows in a folder yet; the commands that did not succeed, which keep no other from running.

    Raises ValueError where there is no GPU: what the problems ask for would take a CPU days.
    """
    if gpu_count() == 0:
        raise ValueError("measure is True: it needs a CUDA GPU; without it rows that are there will do")
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for command, case in {each.command: each.case for problem in problems for each in problem.exhibits}.items():
        done, half = results / case, results / f"{case}.part"
        if command.startswith("bench "):  # which knows what its row file has already
            more = ["--resume", "--out", str(results)]
        elif done.exists():
            continue
        else:
            shutil.rmtree(half, ignore_errors=True)  # what an interrupt has left
            more = ["--out", str(half)]
        words = [*shlex.split(command), *more]
        say(f"cs336 {shlex.join(words)}")
        if subprocess.run([sys.executable, "-m", "cs336_systems", *words], check=False).returncode != 0:
            failed.append(f"cs336 {command}")
        elif half.exists():
            half.rename(done)
    return failed
