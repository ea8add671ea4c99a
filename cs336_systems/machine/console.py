"""The terminal: the command that a person gives, the lines that they see, and the library's log as lines."""

import contextlib
import io
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

COMMAND = "CS336_COMMAND"
"""Environment variable that holds the command that was given, for whatever makes rows."""
_WHERE = ("--out", "--output-dir", "--output_dir", "--out_dir", "--timeout_s")
"""Options of a command, with a value, that do not say what is measured."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
READER_GONE = (OSError, SystemExit)  # rich turns a broken pipe into the latter


def launched_rank() -> int | None:
    """This process's rank among those that torchrun, or our own launch, has started; None for a process by itself.

    A stray RANK is not enough: schedulers and shells leave such variables behind (`check_by_itself`).
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return None
    return count_in_environment("RANK", 0, below="WORLD_SIZE")


def check_by_itself() -> None:
    """Raise ValueError if this process, which torchrun did not start, seems meant to train with others.

    Left alone, each of them would train on the whole batch, and write into the same folder.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK") if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE") and count_in_environment("WORLD_SIZE", 1) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment, without {' and '.join(missing)}: set them "
            "for every process, as torchrun does (LOCAL_RANK is the number of the process on its machine), or unset "
            "WORLD_SIZE to train in one process"
        )


def count_in_environment(name: str, default: int, below: str | None = None) -> int:
    """A number that whoever starts several processes leaves in their environment.

    Raises ValueError naming the variable if it is not a whole number from 0 on, or not below that of another variable.
    """
    value = os.environ.get(name, str(default))
    most = math.inf if below is None else count_in_environment(below, 1)
    if not (value.isascii() and value.isdigit() and int(value) < most):
        accepted = "a whole number from 0 on" + (f", below {below}, which is {most}" if below else "")
        raise ValueError(f"{name} is {value!r} in the environment: it must be {accepted}")
    return int(value)


@contextlib.contextmanager
def by_command(words: Sequence[str]) -> Iterator[None]:
    """Rows that are made inside name this command, without options that say where they go or what is done already."""
    left, kept = list(words), []
    while left:
        word = left.pop(0)
        if word in _WHERE:
            left = left[1:]
        elif word != "--resume" and not word.startswith(tuple(f"{option}=" for option in _WHERE)):
            kept.append(word)
    before = os.environ.get(COMMAND)
    os.environ[COMMAND] = "".join(letter if letter.isprintable() else "?" for letter in shlex.join(kept))
    try:
        yield
    finally:
        del os.environ[COMMAND]
        if before is not None:
            os.environ[COMMAND] = before


def program(name: str = "cs336") -> str:
    """How the command `cs336` was called, or how to call another one beside it, for lines that can be pasted."""
    called = Path(sys.argv[0])
    return str(called.with_name(name)) if called.name == "cs336" else name


def visible(text: str) -> str:
    """The text with escapes for control characters, except newline and tab.

    A terminal would obey them: they move the cursor, change colours, or set the window's title.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(line: str) -> None:
    """Print a line. A reader that has gone (`| head`, a closed terminal) is no reason to lose a run."""
    import rich  # not at the top, so that --help is quick

    console = rich.get_console()
    line = visible(line) if console.is_terminal else line
    with contextlib.suppress(*READER_GONE):
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def no_interrupts_inherited() -> Iterator[None]:
    """A process that this thread starts inside gets no interrupts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Ended(KeyboardInterrupt):
    """A signal that ends this process, raised as an interrupt, because SystemExit would be lost in `say`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


def _end(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):  # a second signal must not disturb the clean-up
        signal.signal(each, signal.SIG_IGN)
    raise Ended(number)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and a hang-up end the block as an interrupt does, so that its processes and folders go with it.

    By default they end this process at once. Here it exits afterwards, with the code that a shell would have seen.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():  # only there may handlers be set
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before[number] = signal.signal(number, _end)
    try:
        yield
    except Ended as ended:
        raise SystemExit(ended.exit_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ConsoleHandler(logging.Handler):
    """Prints log lines through rich's console, so that they do not tear the live progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def start_console(quiet: bool = False) -> None:
    """Prepare this process to print any text, and this project's log. With quiet, only errors of the log.

    A character that stdout's encoding lacks is printed as "?" instead of ending the process with an error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # stdout may be closed, or a notebook's own
        sys.stdout.reconfigure(errors="replace")
    for package in ("cs336_basics", "cs336_systems"):
        log = logging.getLogger(package)
        if not log.handlers:
            log.addHandler(_ConsoleHandler())
            log.setLevel(logging.ERROR if quiet else logging.INFO)
