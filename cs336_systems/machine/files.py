"""Atomic writes: a write that fails leaves the previous file as it was."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

from cs336_basics.files import replaced


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write or replace a file, with text as UTF-8, and return its path. An old file's mode and links to it are kept.

    Raises OSError naming the file if the write fails; the old file is then unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()  # replace the file behind a link, not the link
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replaced(target) as beside, beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, beside)
    except OSError as error:  # it may name no file, or the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def write_figure(figure: Any, path: Path, **metadata: str) -> Path:
    """Write a figure as PNG, as `write_whole` does."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata=metadata)
    return write_whole(path, drawn.getvalue())
