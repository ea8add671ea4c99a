"""The command `cs336`: finds the subcommand, runs it, and turns errors into exit codes.

A user's mistake prints one line on stderr and exits with 2. A failed run prints one line and exits with 1. A run that
SIGINT stops saves a checkpoint and exits with 0. After SIGTERM the code is 143 (128 + 15) and after a hang-up 129, so
that a scheduler knows that the run is not finished.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from ..machine.console import (
    Ended,
    by_command,
    imports_end_at_interrupts,
    launched_rank,
    one_line,
    start_console,
)
from .arguments import wrong_choice

# The function that runs each command, and its line in the help. Imported when needed, because most load PyTorch.
COMMANDS = {
    "train": ("train:train", "train a language model: text in, trained model out"),
    "speedrun": ("speedrun.command:speedrun", "choose and train the best model for a time budget"),
    "generate": ("models:generate", "sample from a trained model"),
    "evaluate": ("evaluate:evaluate", "measure a trained model on a text or on standard tasks"),
    "export": ("models:export", "write a trained model as a Hugging Face folder"),
    "import-hf": ("models:import_hf", "make a run from a Hugging Face folder"),
    "bench": ("bench:bench", "benchmark the parts"),
    "profile": ("profile:profile", "show where time and memory go"),
    "plan": ("plan:plan", "predict memory, time and communication by arithmetic"),
    "report": ("report:report", "make tables and plots of runs and measurements"),
}
_USAGE = """\
usage: cs336 COMMAND ...

Start here:
  cs336 train --config configs/demo.json --run_dir runs/demo
      train a small model on generated stories: minutes on a CPU
  cs336 bench model --quick
      time a model's passes in a tiny form: seconds on a CPU
  cs336 report runs runs/demo
      show the loss and speed of the run

Commands:
{}

`cs336 COMMAND --help` explains each.""".format(
    "\n".join(f"  {name:<11}{description}" for name, (_, description) in COMMANDS.items())
)
_INTERRUPTED = RuntimeError("interrupted")


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Run `cs336 COMMAND ARGUMENTS`; return its exit code."""
    module, _, function = COMMANDS[command][0].partition(":")
    with by_command(["cs336", command, *arguments]):
        return getattr(import_module(f".{module}", __package__), function)(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `cs336` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        start_console(quiet=bool(launched_rank()))
    except ValueError as error:  # a wrong RANK, which `_fail` would also look at
        print(f"cs336: {error}", file=sys.stderr)
        sys.exit(2)
    if arguments == ["--version"]:
        print(f"cs336 {metadata.version('cs336-systems')}")
        sys.exit(0)
    if not arguments or arguments[0] not in COMMANDS:
        if arguments and not arguments[0].startswith("-"):
            print(f"cs336: {wrong_choice('the word after cs336', arguments[0], list(COMMANDS))}", file=sys.stderr)
            sys.exit(2)
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(_USAGE, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    try:
        with imports_end_at_interrupts():
            code = run_command(arguments[0], arguments[1:])
        if sys.stdout is not None:  # it is None if the shell closed it: `>&-`
            sys.stdout.flush()
        sys.exit(code)
    except Ended as ended:
        _fail(ended, ended.exit_code)
    except KeyboardInterrupt:
        _fail(_INTERRUPTED, 130)
    except (ValueError, FileNotFoundError, ImportError) as error:  # ImportError: an optional package is missing
        _fail(error, 2)
    except BrokenPipeError:  # the reader of the output has seen enough: `cs336 plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        sys.exit(128 + 13)  # the exit code after SIGPIPE
    except MemoryError:
        _fail(RuntimeError("out of memory: the configuration asks for more than this machine has"), 1)
    except (RuntimeError, OSError) as error:
        _fail(error, 1)


def _fail(error: BaseException, code: int) -> None:
    if launched_rank() is not None:
        from ..parallel.failure import leave_failure

        leave_failure(error)
        os._exit(code)  # a normal exit may wait forever for dead ranks
    print(f"cs336: {one_line(error)}", file=sys.stderr)
    sys.exit(code)
