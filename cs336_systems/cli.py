"""One command, `cs336`. Thin: it reads arguments, calls the library and prints.

A user's mistake is one line on stderr and exit code 2, a failed run one line and exit code 1. A run that SIGINT stopped
ends with 0 after it has saved; SIGTERM ends with 143 (128 + 15), so that a scheduler sees that it was not finished.
"""

import difflib
import json
import logging
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich
from jsonargparse import ArgumentParser, set_parsing_settings

from .config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    TrainConfig,
)

_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "sample": SampleConfig,
    "log": LogConfig,
}
EXIT_SIGTERM = 143


def train_parser() -> ArgumentParser:
    """The parser of `cs336 train`: a JSON file and every field of RunConfig."""
    # The docstring under each field becomes its help.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="cs336 train",
        description="Text in, trained language model out.",
        exit_on_error=False,
        print_config=None,
    )
    parser.add_argument("--config", action="config", help="JSON file with any of the fields below.")
    parser.add_argument("--print_config", action="store_true", help="Print the resolved configuration and stop.")
    parser.add_class_arguments(RunConfig, skip={"skip_data", *_GROUPS})
    parser.add_argument(
        "--skip_data",
        type=bool,
        nargs="?",
        const=True,
        default=False,
        help="Use the token files as they are; make nothing.",
    )
    for name, cls in _GROUPS.items():
        parser.add_class_arguments(cls, name)
    return parser


def parse_run_config(arguments: Sequence[str]) -> tuple[RunConfig, bool]:
    """The RunConfig of some command-line arguments, and whether it is only to be printed.

    Raises ValueError with one line for an unknown field, a wrong type or an impossible value.
    """
    parser = train_parser()
    try:
        namespace = parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise ValueError(_one_line(str(error), parser)) from error
    built = parser.instantiate(namespace)
    fields = {name: built[name] for name in ("run_dir", "resume", "skip_data", *_GROUPS)}
    return RunConfig(**fields), built.print_config


def load_config(path: str | Path, **overrides: Any) -> RunConfig:
    """A RunConfig from a JSON file, with fields overridden by dotted name: load_config(p, **{"train.max_steps": 5})."""
    arguments = [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()
    ]
    return parse_run_config(["--config", str(path), *arguments])[0]


def _one_line(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's message, shortened to a line, with the nearest field name for one that is unknown."""
    if found := re.match(r'Parser key "(?P<name>[^"]+)":\s*(?P<rest>.*)', message, re.S):
        name, rest = found["name"], " ".join(found["rest"].split())
        if union := re.search(r"Subtypes: \[(?P<types>.*?)\] .*Given value: (?P<value>.*)", rest):
            types = re.sub(r"<class '(.*?)'>", r"\1", union["types"]).replace("NoneType", "null")
            return f"{name} is {union['value']}: it must be {' or '.join(types.split(', '))}"
        return f"{name}: {rest}"
    known = sorted(action.dest for action in parser._actions)
    unknown = re.search(r"unrecognized arguments: --([\w.]+)", message)
    in_group = re.search(r"Group '(.*?)' does not accept option '(.*?)'", message)
    if unknown or in_group:
        name = unknown[1] if unknown else f"{in_group[1]}.{in_group[2]}"  # type: ignore[index]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        return f"unknown field {name}" + (f": did you mean {near[0]}?" if near else "")
    return " ".join(message.split())


def _train(arguments: Sequence[str]) -> int:
    config, print_only = parse_run_config(arguments)
    if print_only:
        print(json.dumps(config.to_dict(), indent=2))
        return 0
    from .training import train

    result = train(config)
    print_line = rich.get_console().print
    if result.interrupted is not None:
        print_line(
            f"stopped by {result.interrupted} at step {result.step}: --resume auto --run_dir {result.run_dir} goes on",
            markup=False,
            soft_wrap=True,
        )
        return EXIT_SIGTERM if result.interrupted == "SIGTERM" else 0
    for line in _summary(result):
        print_line(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _summary(result: Any) -> list[str]:
    lines = [
        "",
        f"validation loss  {result.valid_loss:.4f} nats a token",
        f"unigram entropy  {result.unigram_entropy:.4f} of the same text: how frequent each token is in it",
        f"bigram entropy   {result.bigram_entropy:.4f} of the same text: how frequent each token is after another",
        f"bigram model     {result.bigram_model_loss:.4f} on the same text, from the pairs of the training text",
    ]
    if result.sample is not None:
        lines += ["", "sample:", *(f"    {line}" for line in result.sample.splitlines())]
    return [
        *lines,
        "",
        f"run folder       {result.run_dir}",
        f"loss curve       {result.loss_curve}",
        f"checkpoint       {result.checkpoint}",
    ]


_COMMANDS = {"train": _train}


def _usage() -> str:
    return "usage: cs336 {train} ...\n\n  train     text in, trained language model out\n\nEach has its own --help."


class _ConsoleHandler(logging.Handler):
    """Log lines through rich's console, so that they do not tear the live progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        rich.get_console().print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `cs336` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    log = logging.getLogger("cs336_systems")
    if not log.handlers:
        log.addHandler(_ConsoleHandler())
        log.setLevel(logging.INFO)
    if not arguments or arguments[0] not in _COMMANDS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        print(_usage(), file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)
    try:
        sys.exit(_COMMANDS[arguments[0]](arguments[1:]))
    except (ValueError, FileNotFoundError) as error:
        _fail(error, 2)
    except (RuntimeError, OSError) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    print(f"cs336: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(code)
