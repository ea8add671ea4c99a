"""A stage makes one file of the data, and is skipped if that file is up to date.

The stamp beside a file holds the hashes of the stage's inputs and of the file itself. A file whose inputs changed, or
which was damaged, is made again. A file without a stamp is the user's own: it is used as it is and never replaced.
"""

import contextlib
import fcntl
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cs336_basics.files import sha256_of_file, write_json

from ..config.run import DataConfig

logger = logging.getLogger(__name__)


def in_data_dir(data: DataConfig, path: Path) -> bool:
    """Whether a file is in data_dir."""
    return path.parent.resolve() == Path(str(data.data_dir)).resolve()


def is_kept(data: DataConfig, path: Path) -> bool:
    """Whether a file is there and no stage may replace it.

    Two kinds of files are kept: the user's own, and whole files outside data_dir, on which other runs may rely.
    """
    if not path.is_file() or not _stamp(path).is_file():
        return path.is_file()
    return not in_data_dir(data, path) and _read_stamp(path).get("inputs") is not None


def run_stage(
    data: DataConfig,
    name: str,
    output: Path,
    inputs: dict[str, Any],
    make: Callable[[], None],
    *,
    sidecar: Path | None = None,
    before_making: Callable[[], None] | None = None,
) -> None:
    """Call `make`, which writes `output` and its sidecar, unless the file is kept or up to date.

    `before_making` is called first, and may prevent it by raising an error. Raises ValueError if a file of the user's
    is where the sidecar goes.
    """
    if is_kept(data, output):
        logger.info("%s: %s exists and is used as it is", name, output)
        return
    stamp = _stamp(output)
    if sidecar is not None and sidecar.is_file() and not stamp.is_file():
        raise ValueError(f"{sidecar} is your own file, in the place of the sidecar of {output}: move one of them")
    files = [output] if sidecar is None else [output, sidecar]

    def hashes() -> dict[str, str | None]:
        return {path.name: sha256_of_file(path) if path.is_file() else None for path in files}

    why = "which does not exist"
    if output.is_file():
        if _read_stamp(output) == {"inputs": inputs, "sha256": hashes()}:
            logger.info("%s: %s is up to date, skipped", name, output)
            return
        why = "because the text, the tokenizer or a setting changed, or the file is damaged"
    if before_making is not None:
        before_making()
    logger.info("%s: making %s, %s", name, output, why)  # shows a mistyped name of an existing file
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(stamp, {"inputs": None, "sha256": None})  # unfinished: if the stage is interrupted, it runs again
    make()
    write_json(stamp, {"inputs": inputs, "sha256": hashes()})


def _stamp(path: Path) -> Path:
    return path.with_name(f"{path.name}.stamp.json")


def _read_stamp(path: Path) -> dict[str, Any]:
    """The stamp of a file; empty if it is broken."""
    try:
        stamp = json.loads(_stamp(path).read_text())
    except ValueError:
        return {}
    return stamp if isinstance(stamp, dict) else {}


@contextlib.contextmanager
def one_at_a_time(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """Hold the folder's lock; wait for another process that has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / lock).open("a")
    except OSError as error:
        raise ValueError(
            f"data.data_dir {folder} cannot be written to: {error.strerror} (with --skip_data, token files that are "
            "there are used as they are)"
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("data: waiting for another process that makes files in %s", folder)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
