"""Files that are written whole: a write that fails leaves the previous file as it was."""

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
    """Write a file, text as UTF-8, in place of any that is there; return its path. Mode and links are kept.

    What is not a regular file, such as /dev/stdout, is written into. Raises OSError naming the file if that fails; then
    the file is as it was, or not there.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        target = path.resolve()  # a link stays one
        if target.exists() and not target.is_file():
            target.write_bytes(data)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(target, data)
    except RuntimeError as error:  # Python 3.12 and before, for links that lead to each other
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    except OSError as error:  # it names no file, or the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, for code that writes by itself; it replaces `path` once it is written.

    Raises OSError naming the file if that fails; then the file is as it was, or not there.
    """
    beside = path.with_name(f"writing-{path.name}")  # with the same suffix, because that may decide about compression
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
            os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_figure(figure: Any, path: Path, **metadata: str) -> Path:
    """Write a figure as PNG, as `write_whole` does."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata=metadata)
    return write_whole(path, drawn.getvalue())
