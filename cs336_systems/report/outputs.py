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

from ..machine.files import write_whole
from ..planner.rows import naming
from .pictures import hash_in

RECORD = ".cs336-report.json"


def write_into(out: Path, make: Callable[[Path], Sequence[Path | str]]) -> list[Path | str]:
    """Let `make` write files into a temporary folder, move them to `out`, and return its result with paths in `out`.

    Raises ValueError naming the first file that is not the report's own and would be replaced; then nothing changes.
    """
    record: dict[str, str] = {}
    if (out / RECORD).is_file():
        with naming(str(out / RECORD)):
            record = dict(json.loads((out / RECORD).read_text()))
    with tempfile.TemporaryDirectory(prefix="cs336-") as made:
        folder = Path(made)
        returned = make(folder)
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for name in names:
            path = out / name
            if path.is_file() and _sha256(path) != record.get(name) and not _is_picture_of_a_report(path):
                raise ValueError(
                    f"out is {str(out)!r}: its {name} was not written by a report, or was changed since, and is not "
                    "replaced; move it, or choose another folder"
                )
        for name in names:
            record[name] = _sha256(write_whole(out / name, (folder / name).read_bytes()))
    write_whole(out / RECORD, json.dumps(record, indent=1) + "\n")
    return [out / each.relative_to(folder) if isinstance(each, Path) else each for each in returned]


def _is_picture_of_a_report(path: Path) -> bool:
    with contextlib.suppress(OSError):  # not a picture
        return path.suffix == ".png" and hash_in(path) is not None
    return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
