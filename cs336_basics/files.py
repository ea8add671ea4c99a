"""Files that appear whole or not at all."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SAVE_EVERY_S = 10


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to; at the end of the block, the file there replaces `path`.

    If the block fails, the old file stays as it was. An OSError of the write names `path`.
    """
    beside = Path(path).with_name(f"writing-{Path(path).name}")  # keeps the suffix, which may decide the compression
    try:
        with naming_file(path):
            yield beside
            os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


class Growing:
    """A file that is written from front to back. `state` is what the writer noted at the last mark; None at first."""

    def __init__(self, file: BinaryIO, note: Path, inputs: dict[str, Any], size: int, state: Any) -> None:
        self.file, self.state = file, state
        self._note, self._inputs = note, inputs
        self._marked, self._saved_at = (size, state), time.monotonic()

    def mark(self, state: Any) -> bool:
        """Say that everything up to here counts, with a state from which the writer can go on: any JSON.

        Returns whether the mark was saved, which is done every ten seconds, so that it outlives a kill.
        """
        self._marked = self.file.tell(), state  # one assignment: Ctrl-C comes before it or after it
        is_due = time.monotonic() > self._saved_at + SAVE_EVERY_S
        if is_due:
            self.save()
        return is_due

    def save(self) -> None:
        """Note the last mark on the disk."""
        self.file.flush()
        size, state = self._marked
        write_json(self._note, {"inputs": self._inputs, "size": size, "state": state})
        self._saved_at = time.monotonic()


@contextlib.contextmanager
def continued(path: str | os.PathLike[str], inputs: dict[str, Any]) -> Iterator[Growing]:
    """A file to write in PATH.partial; at the end of the block, it replaces `path`.

    If the block fails, the file stays as it was at the last mark, and a later block with equal inputs goes on there.
    After a kill, it goes on at the last mark that was saved.
    """
    path = Path(path)
    partial, note = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.partial.json")
    size, state = 0, None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(note.read_bytes())
        if found["inputs"] == inputs and partial.stat().st_size >= found["size"]:
            size, state = found["size"], found["state"]
    with naming_file(path):
        if state is None:
            note.unlink(missing_ok=True)  # else it would describe what is written from now on, if that is killed
        partial.touch()
        with partial.open("r+b") as file:
            file.truncate(size)
            file.seek(size)
            growing = Growing(file, note, inputs, size, state)
            try:
                yield growing
            except BaseException:
                growing.save()
                raise
        os.replace(partial, path)
    note.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an OSError that lacks one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_json(path: str | os.PathLike[str], value: dict[str, Any]) -> None:
    """Write a JSON file whole. Raises OSError naming the file."""
    with replaced(path) as beside:
        beside.write_text(json.dumps(value, indent=2) + "\n")
