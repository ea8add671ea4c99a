"""Files that are whole: what cannot be written leaves the one before as it was."""

import io
import os
import shutil
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file, text as UTF-8, in the place of the one that is there; its path. Mode and links are kept.

    Raises OSError naming the file where that fails; then it is as it was, or not there.
    """
    target = path.resolve()  # a link stays one
    beside = target.with_name(f"{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, beside)
        os.replace(beside, target)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):  # which does not say by itself, or names the file beside
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return path


def write_figure(figure: Any, path: Path, **metadata: str) -> Path:
    """Write a figure as PNG, as `write_whole` does."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata=metadata)
    return write_whole(path, drawn.getvalue())
