"""The console: output, logging, signals, and the environment that launchers set."""

import contextlib
import io
import logging
import math
import os
import re
import shlex
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

COMMAND = "CS336_COMMAND"
"""Environment variable with the user's command. Rows record it."""
_WHERE = ("--out", "--output-dir", "--output_dir", "--out_dir")
"""Options with a value that do not change a measurement. Rows leave them out of the command."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PROJECT = tuple(f"{Path(__file__).parents[2] / package}{os.sep}" for package in ("cs336_basics", "cs336_systems"))
_INSTALLED = tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "purelib", "platlib", "scripts"))
READER_GONE = (OSError, SystemExit)  # rich turns a broken pipe into SystemExit


def launched_rank() -> int | None:
    """The rank that torchrun or our own launcher gave this process; None for a process by itself.

    RANK alone does not count, because schedulers and shells leave it behind (see `check_single_process`).
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        return None
    return count_in_environment("RANK", 0, below="WORLD_SIZE")


def check_single_process() -> None:
    """Raise ValueError if WORLD_SIZE suggests several processes, but this one has no rank.

    Otherwise each process would train on the whole batch and write into the same folder.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK") if name not in os.environ]
    if missing and os.environ.get("WORLD_SIZE") and count_in_environment("WORLD_SIZE", 1) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment, without {' and '.join(missing)}: set them "
            "for every process, as torchrun does (LOCAL_RANK is the number of the process on its machine), or unset "
            "WORLD_SIZE to train in one process"
        )


def count_in_environment(name: str, default: int, below: str | None = None) -> int:
    """A number that a launcher sets, from 0 on and below the variable `below`. Raises ValueError naming it."""
    value = os.environ.get(name, str(default))
    most = math.inf if below is None else count_in_environment(below, 1)
    if not (value.isascii() and value.isdigit() and int(value) < most):
        accepted = "a whole number from 0 on" + (f", below {below}, which is {most}" if below else "")
        raise ValueError(f"{name} is {value!r} in the environment: it must be {accepted}")
    return int(value)


def one_line(error: BaseException) -> str:
    """An error's message in one line; with its type and place if a user's own code raised it."""
    message = " ".join(str(error).split()) or type(error).__name__
    user: list[traceback.FrameSummary] = []
    for frame in traceback.extract_tb(error.__traceback__ if isinstance(error, Exception) else None):
        if frame.filename.startswith(_PROJECT):
            user.clear()  # what this project raises is told by its message
        elif not frame.filename.startswith((*_INSTALLED, "<")):
            user.append(frame)
    return f"{message} ({type(error).__name__} at {user[-1].filename}:{user[-1].lineno})" if user else message


@contextlib.contextmanager
def by_command(words: Sequence[str]) -> Iterator[None]:
    """Let rows made inside record this command, without its output folder and --resume."""
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
    """How the user called `cs336`, or how to call another program beside it, for commands that can be pasted."""
    called = Path(sys.argv[0])
    return str(called.with_name(name)) if called.name == "cs336" else name


def visible(text: str) -> str:
    """Escape control characters except newline and tab, so that text cannot control the terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(line: str) -> None:
    """Print a line. A closed terminal or pipe (`| head`) does not end the run."""
    import rich  # here, so that --help is quick

    console = rich.get_console()
    line = visible(line) if console.is_terminal else line
    with contextlib.suppress(*READER_GONE):
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def no_interrupts_inherited() -> Iterator[None]:
    """Processes started inside get no interrupts from the terminal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def imports_end_at_interrupts() -> Iterator[None]:
    """Let SIGINT during an import end the process at once, with exit code 130 and without any clean-up.

    PyTorch and NumPy swallow a KeyboardInterrupt there, and stay half imported.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if any(each.f_code.co_filename == "<frozen importlib._bootstrap>" for each, _ in traceback.walk_stack(frame)):
            os.write(2, b"cs336: interrupted\n")
            os._exit(130)
        signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()  # Python allows handlers only there
    is_default = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Ended(KeyboardInterrupt):
    """A signal that ends this process. It is a KeyboardInterrupt because `say` would swallow SystemExit."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as an interrupt does, so that its processes and folders are cleaned up.

    The process then exits with the code that a shell reports for the signal.
    """
    signals, before = (signal.SIGTERM, signal.SIGHUP), {}

    def end(number: int, _: object) -> None:
        for each in signals:  # a second signal must not disturb the clean-up
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
        for number in signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                before[number] = signal.signal(number, end)
    try:
        yield
    except Ended as ended:
        raise SystemExit(ended.exit_code) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ConsoleHandler(logging.Handler):
    """Prints log lines through rich's console, above the live progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def start_console(quiet: bool = False) -> None:
    """Set up stdout, which prints "?" for characters that its encoding lacks, and logging; `quiet` logs only errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may also be closed, or belong to a notebook
        sys.stdout.reconfigure(errors="replace")
    for package in ("cs336_basics", "cs336_systems"):
        log = logging.getLogger(package)
        if not log.handlers:
            log.addHandler(_ConsoleHandler())
            log.setLevel(logging.ERROR if quiet else logging.INFO)
