"""The command line for tests: a tiny model, the command in this process or its own, and its one-line errors."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cs336_systems.cli.train import parse_run_config
from tests import forked

MODEL: dict[str, Any] = dict(vocab_size=300, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
TINY = [f"--model.{name}={value}" for name, value in MODEL.items()]
SHORT = ["--train.max_steps=2", "--train.batch_size=4", "--train.validation_sequences=4", "--data.story_chars=10000"]

Run = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[..., str]


def process(
    *arguments: str, code: str = "from cs336_systems.cli.main import main; main()", fresh: bool = False
) -> tuple[int, str, str]:
    """Run the command in a process of its own; return exit code, stdout and stderr. fresh: in a new interpreter."""
    start = subprocess.Popen if fresh else forked.Popen
    done = forked.run([sys.executable, "-c", code, *arguments], 120, start)
    return done.returncode, done.stdout, done.stderr


def the_line(result: tuple[int, str, str], code: int = 2) -> str:
    """The one line of a failed command, without its `cs336: `."""
    returned, _, err = result
    assert err.startswith("cs336: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert returned == code, err
    return err.removeprefix("cs336: ").strip()


def error_of(*arguments: str) -> str:
    """The one-line error of parsing arguments of `cs336 train`."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_run_config(arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
