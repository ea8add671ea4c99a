"""The row: one JSON object per measurement. Tables, plots and documents take their numbers from rows only."""

import contextlib
import errno
import fcntl
import functools
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ..config.checks import require
from ..machine.console import COMMAND
from ..machine.files import write_whole
from ..machine.hardware import environment

logger = logging.getLogger(__name__)
_BEGIN = b'{"case"'
_STATUSES = ("ok", "oom", "error")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement: its configuration, its outcome, its metrics, and the machine."""

    case: str
    variant: str
    config: dict[str, Any]
    status: Literal["ok", "oom", "error"] = "ok"
    metrics: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=lambda: stamp())
    error: str | None = None


def stamp() -> dict[str, Any]:
    """Machine, versions, commit, date, and the command if there is one."""
    command = {"command": given} if (given := os.environ.get(COMMAND)) else {}
    return {**environment(), "date": f"{datetime.now(UTC):%Y-%m-%d}", **command}


def exit_code(rows: Sequence[Row]) -> int:
    """The exit code of a command with these rows: 1 if all are errors, otherwise 0. Out of memory is no error."""
    return int(bool(rows) and all(row.status == "error" for row in rows))


def append_row(path: Path, row: Row, instead_of: Row | None = None) -> None:
    """Append a row to a JSON Lines file. If it cannot be written whole, nothing of it stays in the file.

    instead_of: a row that it replaces if the file has it. Processes that write to the same file take turns.
    """
    line = _line(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _held(path) as file:
        file.seek(0)
        before = file.read()
        last = before.rpartition(b"\n")[2]
        if _is_cut(last):
            before = before[: -len(last)]
        elif last:
            line = b"\n" + line
        if instead_of is not None and (old := _line(instead_of)) in before:
            write_whole(path, before.replace(old, line, 1))
            return
        length = file.truncate(len(before))
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # which does not name the file
            file.truncate(length)
            raise OSError(error.errno, error.strerror, str(path)) from error


def _line(row: Row) -> bytes:
    return (json.dumps(asdict(row)) + "\n").encode()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[Any]:
    """Open a file to append, locked against other processes, and again if one of them has replaced it meanwhile."""
    while True:
        with path.open("ab+", buffering=0) as file:  # closing must not repeat a failed write
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return


def _is_cut(line: bytes) -> bool:
    """Whether the last line of a file is an incomplete row, as a killed process leaves it."""
    if not line or not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file. An incomplete last row is left out with a warning.

    Raises ValueError naming file and line for any other line that is not a row, and for a metric that is not finite in
    a row of status ok.
    """
    if not path.exists():
        raise FileNotFoundError(f"row file {path} does not exist")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise ValueError(f"row file {path} is {kind}: it must be a file with a row a line")
    content = path.read_bytes()
    lines = content.splitlines()
    rows = []
    for i, line in enumerate(lines):
        try:
            loaded = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) - 1 and not content.endswith(b"\n") and _is_cut(line):
                _warn_of_cut(path, i + 1)
                continue
            raise ValueError(f"{path}, line {i + 1} is not JSON: {error}") from error
        try:
            rows.append(_row(loaded))
        except ValueError as error:
            raise ValueError(f"{path}, line {i + 1}: {error}") from error
    return rows


@functools.cache  # a command may read a file several times
def _warn_of_cut(path: Path, line: int) -> None:
    logger.warning("%s, line %d was cut short, left out", path, line)


def _row(loaded: Any) -> Row:
    names = [field.name for field in fields(Row)]
    if not isinstance(loaded, dict) or loaded.keys() != set(names):
        raise ValueError(f"a row must be an object with exactly {', '.join(names)}")
    for name in ("case", "variant"):
        require(isinstance(loaded[name], str), name, loaded[name], "text")
    for name in ("config", "metrics", "env"):
        require(isinstance(loaded[name], dict), name, loaded[name], "an object")
    row = Row(**loaded)
    if row.status not in _STATUSES:
        raise ValueError(f"status is {row.status!r}: it must be one of {', '.join(_STATUSES)}")
    if row.status == "ok" and (complaint := not_finite(row.metrics)):  # a failed row may have failed for that
        raise ValueError(complaint)
    return row


def not_finite(metrics: dict[str, Any]) -> str | None:
    """A complaint about the first metric that is infinite or NaN; None if all are finite."""
    for name, leaf in _leaves("metrics", metrics):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            return f"{name} is {leaf!r}: it must be a finite number"
    return None


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values inside of objects and lists, with their dotted names."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inside is None:
        yield name, value
    for key, part in inside or ():
        yield from _leaves(f"{name}.{key}", part)
