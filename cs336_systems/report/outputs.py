"""Files of a report in a folder that may hold others: only files that a report wrote, and nobody changed, are replaced.

A record in the folder has the SHA-256 of each file. Pictures also carry a hash of their own (`pictures.py`), so that
they are known where the record is not kept, as in docs/.
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
    """Let `make` write files into a folder, then put them into `out`; return what it returned, as paths in `out`.

    `make` finds the files that are the report's own; those that it removes are removed from `out`. Raises ValueError
    naming the first file of somebody else's that would be replaced; then nothing has changed.
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
    """Raise ValueError naming what stands where a file is to be written, unless it is the report's own."""
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
    with contextlib.suppress(OSError):  # it is no picture
        return path.suffix == ".png" and hash_in(path) is not None
    return False


def _read_record(path: Path) -> dict[str, Any]:
    """The hashes by the files' names in the folder; empty for a record that is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if isinstance(record, dict):
            return record
    return {}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
