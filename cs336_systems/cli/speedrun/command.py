"""`cs336 speedrun`: the best model for a time budget. Reads arguments; `speedrun/run.py` does the work."""

import itertools
import re
from collections.abc import Sequence

from ...config.checks import require
from ...config.run import GROUPS
from ..arguments import make_parser, parse
from ..train import parse_run_config, train

_FIELD = re.compile(rf"--((?:{'|'.join(GROUPS)})\.\w+)(=.*)?", re.S)


def speedrun(arguments: Sequence[str]) -> int:
    """Run `cs336 speedrun` and return its exit code."""
    parser = make_parser(
        "speedrun",
        "The best model for a time budget: times some sizes, chooses one and trains it. Also takes the fields of "
        "cs336 train (--data.source text --data.train_text FILE, --model.context_length 512 ...).",
    )
    parser.add_argument(
        "--minutes", type=float, default=None, help="Approximate time for search and training together (default: 20)."
    )
    parser.add_argument("--epochs", type=float, default=None, help="Passes over the text, instead of a time.")
    parser.add_argument("--size", type=str, default=None, help="Size of the model (default: the best for the time).")
    parser.add_argument("--devices", type=int, default=None, help="GPUs to use (default: all), or processes on a CPU.")
    parser.add_argument("--out", type=str, default=None, help="Folder for all output, data included (default: runs and "
                        "data in this folder). Use it if this folder is read-only.")  # fmt: skip
    parser.add_argument("--dry_run", action="store_true", help="Search (up to a fifth of the minutes), print the "
                        "commands and stop before training.")  # fmt: skip

    own: list[str] = []
    fields: list[str] = []  # of `cs336 train`, with their values
    given: set[str] = set()
    words = iter(arguments)
    for word in words:
        if found := _FIELD.fullmatch(word):
            given.add(found[1])
            fields += [word] if found[2] else [word, *itertools.islice(words, 1)]
        else:
            own.append(word)
    if any(word.partition("=")[0] == "--config" for word in own):
        raise ValueError("config is given: it must be left out, a speedrun makes one (fields of it may be given)")
    options = parse(parser, own)
    minutes, epochs = options.minutes, options.epochs
    require(minutes is None or 0 < minutes < 1e5, "minutes", minutes, "above 0 and below 1e5")
    require(epochs is None or 0 < epochs < 1e5, "epochs", epochs, "above 0 and below 1e5")
    require(minutes is None or epochs is None, "epochs", epochs, "left out where minutes is given")
    from .run import Speedrun  # imports PyTorch, which --help does not need

    file = Speedrun(lambda chosen: parse_run_config([*chosen, *fields])[0], given, options).prepare()
    return 0 if options.dry_run else train(["--config", str(file)])
