"""Atomic writes: a write that fails leaves the previous file as it was."""

import contextlib
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write or replace a file, with text as UTF-8, and return its path. An old file's mode and links to it are kept.

    A path such as /dev/stdout or a pipe is written to directly. Raises OSError naming the file if the write fails; the
    old file is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        target = path.resolve()  # replace the file behind a link, not the link
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(target, data)
    except RuntimeError as error:  # a cycle of links, in Python 3.12 and before
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    except OSError as error:  # it may name no file, or the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path for other code to write to. The file then replaces `path`.

    Raises OSError naming the file if the write fails; the old file is then unchanged.
    """
    beside = path.with_name(f"writing-{path.name}")  # the same suffix, which may decide the compression
    try:
        yield beside
        os.replace(beside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        beside.unlink(missing_ok=True)


def _replace(target: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".tmp")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, name)
        else:
            mask = os.umask(0o077)  # the umask can only be read by setting it
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_figure(figure: Any, path: Path, **metadata: str) -> Path:
    """Write a figure as PNG, as `write_whole` does."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata=metadata)
    return write_whole(path, drawn.getvalue())
