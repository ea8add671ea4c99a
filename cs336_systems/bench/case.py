"""The row: one JSON object a measurement, the only place that tables, plots and docs take numbers from."""

import json
import logging
import os
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ..hardware import environment

logger = logging.getLogger(__name__)
_STATUSES = ("ok", "oom", "error")
_TYPES = {"case": str, "variant": str, "config": dict, "status": str, "metrics": dict, "env": dict}
_JSON_NAMES = {str: "a string", dict: "an object"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measurement: what was run (`case`, `variant`, `config`), how it ended, what was measured, on what machine."""

    case: str
    variant: str
    config: dict[str, Any]
    status: Literal["ok", "oom", "error"] = "ok"
    metrics: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=lambda: {**environment(), "date": f"{datetime.now(UTC):%Y-%m-%d}"})
    error: str | None = None

    def __post_init__(self) -> None:
        for name, cls in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, cls):
                raise ValueError(f"{name} of a row is {value!r}: it must be {_JSON_NAMES[cls]}")
        if self.status not in _STATUSES:
            raise ValueError(
                f"status of a row of case {self.case!r}, variant {self.variant!r} is {self.status!r}: "
                f"it must be one of {', '.join(_STATUSES)}"
            )


def check_row_file(path: str | os.PathLike[str]) -> Path:
    """The path, once it is sure that rows can be appended there. Raises ValueError naming `out` where they cannot."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+", buffering=0) as file:
            file.seek(0, os.SEEK_END)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"out is {str(path)!r}: it must be a file that can be written ({reason})") from error
    return Path(path)


def append_row(path: Path, row: Row) -> None:
    """Append a row to a JSON Lines file, as a line of its own; a row that cannot be written whole leaves nothing."""
    left = (json.dumps(asdict(row)) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:  # unbuffered: closing must not write what failed once more
        file.seek(0)
        last = file.read().rpartition(b"\n")[2]
        length = file.seek(0, os.SEEK_END)
        if last and _is_json(last):
            left = b"\n" + left
        elif last:  # what a process that was killed has left: no row, and it would spoil the line
            length = file.truncate(length - len(last))
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            file.truncate(length)
            raise


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSON Lines file. A last line that was cut short is left out, with a warning.

    Raises ValueError naming file and line for any other line that is no row.
    """
    if not path.exists():
        raise FileNotFoundError(f"row file {path} does not exist")
    if path.is_dir():
        raise ValueError(f"row file {path} is a folder: it must be a file with a row a line")
    content = path.read_bytes()
    lines = content.splitlines()
    rows = []
    for i, line in enumerate(lines):
        try:
            loaded = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) - 1 and not content.endswith(b"\n"):
                logger.warning("%s, line %d was cut short, left out", path, i + 1)
                continue
            raise ValueError(f"{path}, line {i + 1} is not JSON: {error}") from error
        try:
            rows.append(_row(loaded))
        except ValueError as error:
            raise ValueError(f"{path}, line {i + 1}: {error}") from error
    return rows


def _row(loaded: Any) -> Row:
    names = [f.name for f in fields(Row)]
    if not isinstance(loaded, dict):
        raise ValueError(f"it must be an object with {', '.join(names)}")
    for name in names:
        if name not in loaded:
            raise ValueError(f"a row has no {name}: it must have {', '.join(names)}")
    for name in loaded:
        if name not in names:
            raise ValueError(f"a row has {name!r}: it must have {', '.join(names)} only")
    return Row(**loaded)
