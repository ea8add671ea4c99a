"""The files of a report in a folder that may hold other files. Only unchanged files of a report are replaced.

A record in the folder has the SHA-256 of each file. Pictures also carry a hash of their own (`pictures.py`), by which
they are recognised in folders without the record, such as docs/.
"""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..machine.files import write_whole
from .pictures import hash_in

RECORD = ".cs336-report.json"


def write_into(out: Path, make: Callable[[Path], Sequence[Path | str]]) -> list[Path | str]:
    """Let `make` write files into a temporary folder, move them to `out`, and return its result with paths in `out`.

    `make` finds the report's own files of `out` in that folder; a file that it removes is removed from `out` too.
    Raises ValueError naming the first file that is not the report's own and would be replaced; then nothing changes.
    """
    record = _read_record(out / RECORD)
    own = [name for name, recorded in record.items() if (out / name).is_file() and _sha256(out / name) == recorded]
    with tempfile.TemporaryDirectory(prefix="cs336-") as made:
        folder = Path(made)
        for name in own:
            write_whole(folder / name, (out / name).read_bytes())
        returned = make(folder)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for name in names:
            _check_free(out, name, is_own=name in own)
        for name in names:
            write_whole(out / name, (folder / name).read_bytes())
    for name in {*own} - {*names}:
        (out / name).unlink()
    record = {name: recorded for name, recorded in record.items() if name not in own}
    record |= {name: _sha256(out / name) for name in names}
    write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return [out / each.relative_to(folder) if isinstance(each, Path) else each for each in returned]


def _check_free(out: Path, name: str, is_own: bool) -> None:
    """Raise ValueError if a file cannot be written because of a file or folder that is not the report's own."""
    path = out / name
    for above in path.relative_to(out).parents:
        if (out / above).exists() and not (out / above).is_dir():
            raise ValueError(f"out is {str(out)!r}: it holds a file {above}, where a folder is to be made")
    if path.is_dir():
        raise ValueError(f"out is {str(out)!r}: it holds a folder {name}, where a file is to be written")
    if path.exists() and not is_own and not _is_picture_of_a_report(path):
        raise ValueError(
            f"out is {str(out)!r}: its {name} was not written by a report, or was changed since, and is not replaced; "
            "move it, or choose another folder"
        )


def _is_picture_of_a_report(path: Path) -> bool:
    with contextlib.suppress(OSError):  # not a picture
        return path.suffix == ".png" and hash_in(path) is not None
    return False


def _read_record(path: Path) -> dict[str, Any]:
    """The hash of each file by its name; empty if the record is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if isinstance(record, dict):
            return record
    return {}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
