"""What a person at the terminal sees: lines, and the library's log as lines."""

import contextlib
import logging
import os

READER_GONE = (OSError, SystemExit)  # rich turns a broken pipe into the latter


def launched_rank() -> int | None:
    """This process's number among those that torchrun, or our own launch, has started; None for one by itself.

    A stray RANK is not enough: schedulers and shells leave such variables behind.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return None
    return int(os.environ["RANK"])


def say(line: str) -> None:
    """Print a line. A reader that has gone (`| head`, a closed terminal) is no reason to lose a run."""
    import rich  # not at the top: --help is to be quick

    with contextlib.suppress(*READER_GONE):
        rich.get_console().print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


class _ConsoleHandler(logging.Handler):
    """Log lines through rich's console, so that they do not tear the live progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def start_logging(quiet: bool = False) -> None:
    """Show this project's log on the console; quiet, for all processes but the first: only errors."""
    log = logging.getLogger("cs336_systems")
    if not log.handlers:
        log.addHandler(_ConsoleHandler())
        log.setLevel(logging.ERROR if quiet else logging.INFO)
