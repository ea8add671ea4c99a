"""The run folder: the names of its files, whose it is, and a lock for one process at a time."""

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path

from ..config.model import SHAPE_FIELDS
from .manifest import find_checkpoints
from .metrics import METRICS_FILE

CHECKPOINTS = "checkpoints"
CONFIG, TOKENIZER, RESULT = "config.json", "tokenizer.json", "result.json"
SAMPLE, LOSS_CURVE = "sample.txt", "loss_curve.png"
LOCK = ".run.lock"  # not .lock: a run in the folder of its data would wait for itself


def check_run_dir(run_dir: Path, own: set[Path]) -> None:
    """Raise ValueError for a folder in which the run would replace files of others. `own` is this run's tokenizer.

    A run writes its config.json first, so a folder with such a file belongs to a run. A model or a package has a
    config.json too, but not with our architecture. Checkpoints without a config.json are a partial copy of a run.
    """
    files = [CONFIG, TOKENIZER, METRICS_FILE, RESULT, SAMPLE, LOSS_CURVE]
    if _is_run_config(run_dir / CONFIG):
        return
    for path in (run_dir / name for name in ([CONFIG] if find_checkpoints(run_dir / CHECKPOINTS) else files)):
        if path.exists() and path not in own:
            raise ValueError(
                f"run_dir {run_dir} holds a {path.name} that is not of a run: it must be a new or an empty folder, or "
                "that of an earlier run"
            )


def is_run(folder: Path) -> bool:
    """Whether a run has begun in this folder: its config.json beside its metrics or its checkpoints."""
    begun = (folder / METRICS_FILE).exists() or bool(find_checkpoints(folder / CHECKPOINTS))
    return begun and _is_run_config(folder / CONFIG)


def _is_run_config(path: Path) -> bool:
    try:
        model = json.loads(path.read_bytes())["model"]
        return model.keys() >= set(SHAPE_FIELDS)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep a second process out of the run folder. The lock ends with the process.

    Raises ValueError for a folder that is in use or cannot be written to. Removes a folder that an error leaves empty.
    """
    lock = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        opened = lock.open("a")
    except OSError as error:
        raise ValueError(f"run_dir {run_dir} cannot be written to: {error.strerror}") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"run_dir {run_dir} is in use by another process") from error
        try:
            yield
        except BaseException:
            if list(run_dir.iterdir()) == [lock]:
                lock.unlink()
                run_dir.rmdir()
            raise
