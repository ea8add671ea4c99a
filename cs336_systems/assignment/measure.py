"""Measures the rows that the write-up lacks: the commands in its boxes, one after the other."""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..machine.console import ended_in_order, no_interrupts_inherited, say
from ..machine.files import write_whole
from ..machine.hardware import gpu_count


def check_gpu() -> None:
    """Raise ValueError without a GPU, because a CPU would take days."""
    if gpu_count() == 0:
        raise ValueError("measure is true: it needs a CUDA GPU; leave it out to use the rows that are there")


def measure_missing(results: Path, missing: Callable[[], Sequence[str]]) -> list[str]:
    """Run the commands that `missing` returns until there is no new one; return those that failed.

    Rows go below `results`. Measuring one setting can uncover the next query without rows, hence the repetition. A
    command that was interrupted comes first the next time: it may have left enough rows for its query, but not all.
    """
    results.mkdir(parents=True, exist_ok=True)
    running = results / ".measuring"
    interrupted = [running.read_text()] if running.exists() else []
    tried: set[str] = set()
    failed = []
    while new := [command for command in dict.fromkeys([*interrupted, *missing()]) if command not in tried]:
        for command in new:
            tried.add(command)
            say(f"{len(tried)}: {command}")
            write_whole(running, command)
            if run_alone([sys.executable, "-m", "cs336_systems", *_words(command, results)]) != 0:
                failed.append(command)
            running.unlink()
    return failed


def _words(command: str, results: Path) -> list[str]:
    """The words after cs336, with a folder for the rows: a profile writes files that need a folder of their own."""
    words = shlex.split(command)[1:]
    if words[0] == "bench":
        return [*words, "--resume", "--out", str(results)]
    return [*words, "--out", str(results / "-".join(re.findall(r"[\w.]+", command)[1:]))]


def run_alone(command: Sequence[str]) -> int:
    """Run a command and return its exit code. A signal that ends this process ends the command first, by SIGTERM.

    A terminal sends Ctrl-C to both. Only this process gets it here, so that only one of them reports the interrupt.
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
