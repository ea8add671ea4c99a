"""`cs336 speedrun`: the best model for a time budget. Reads arguments; `speedrun/run.py` does the work."""

import re
from collections.abc import Sequence
from typing import Any

from ...config.checks import require
from ..arguments import make_parser, parse
from ..train import parse_run_config, train

_FIELD = re.compile(r"--((?:model|data|optimizer|train|parallel|checkpoint|sample|log)\.\w+)(?:=.*)?", re.S)


def speedrun(arguments: Sequence[str]) -> int:
    """Run `cs336 speedrun` and return its exit code. Raises ValueError for wrong arguments."""
    own, fields = _split(arguments)
    if any(word.partition("=")[0] == "--config" for word in own):
        raise ValueError("config is given: it must be left out, a speedrun makes one (fields of it may be given)")
    options = parse(_parser(), own)
    minutes, epochs = options.minutes, options.epochs
    require(minutes is None or 0 < minutes < 1e5, "minutes", minutes, "above 0 and below 1e5")
    require(epochs is None or 0 < epochs < 1e5, "epochs", epochs, "above 0 and below 1e5")
    require(minutes is None or epochs is None, "epochs", epochs, "left out where minutes is given")
    from .run import Speedrun  # brings PyTorch, which --help does not need

    given = {match[1] for word in fields if (match := _FIELD.fullmatch(word))}
    names = {name: getattr(options, name) for name in ("size", "devices", "out", "epochs")}
    minutes = 20.0 if epochs is None and minutes is None else minutes
    file = Speedrun(lambda chosen: parse_run_config([*chosen, *fields])[0], given, minutes=minutes, **names).prepare()
    return 0 if options.dry_run else train(["--config", str(file)])


def _parser() -> Any:
    parser = make_parser(
        "speedrun",
        "The best model for a time budget: times some sizes, chooses one and trains it. Also takes the fields of "
        "cs336 train (--data.source text --data.train_text FILE, --model.context_length 512 ...).",
    )
    parser.add_argument(
        "--minutes", type=float, default=None, help="Time for timing and training together, about (default: 20)."
    )
    parser.add_argument("--epochs", type=float, default=None, help="Passes over the text instead, however long.")
    parser.add_argument("--size", type=str, default=None, help="Size of the model (default: chosen for the time).")
    parser.add_argument("--devices", type=int, default=None, help="GPUs to use (default: all), or processes on a CPU.")
    parser.add_argument("--out", type=str, default=None, help="Folder for everything written, data too (default: runs "
                        "and data here), for a checkout that cannot be written to.")  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="Print the commands and stop before training; "
                        "the search takes up to a fifth of the minutes.")  # fmt: skip
    return parser


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and the fields of `cs336 train` with their values."""
    own: list[str] = []
    fields: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not _FIELD.fullmatch(word):
            own.append(word)
            continue
        fields.append(word)
        if "=" not in word and left:
            fields.append(left.pop(0))
    return own, fields
