"""Files that appear whole or not at all."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
