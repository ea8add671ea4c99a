"""Checkpoints that are whole or not there.

A checkpoint is a folder `step_00000100`. It holds tensors as safetensors files, of each rank its own, and
`manifest.json`. The tensors are written through `torch.distributed.checkpoint`, so that one process and many take the
same path. The manifest is written last, by rank 0, with the size and SHA-256 of every file. The folder is written under
another name, flushed to the disk, and renamed into place, so a crash at any moment leaves either no folder of that name
or a whole one. Nothing is ever unpickled.

All ranks call `save_checkpoint`, `collect_state` and `restore_state` together. The other functions here act on files
and communicate nothing: with several ranks, `together.on_first_rank` calls them.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..parallel import comm
from ..parallel.failure import CollectiveError
from .manifest import (
    MANIFEST,
    Manifest,
    check_identity,
    checkpoint_name,
    describe_files,
    find_checkpoints,
    newest_whole_checkpoint,
    verify_checkpoint,
)
from .state import collect_state, restore_state
from .tensor_files import Rows, read_tensors, tensor_shapes, write_tensors
from .together import main_group, naming_the_rank, on_every_rank, on_first_rank, reason

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Manifest",
    "Rows",
    "check_identity",
    "checkpoint_name",
    "collect_state",
    "find_checkpoints",
    "newest_whole_checkpoint",
    "prune_checkpoints",
    "prune_together",
    "read_tensors",
    "restore_state",
    "save_checkpoint",
    "set_newer_aside",
    "tensor_shapes",
    "verify_checkpoint",
]

logger = logging.getLogger(__name__)

_SAVING, _DELETING = ".saving-", ".deleting-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor | Rows],
    *,
    step: int,
    sequences: int,
    identity: dict[str, Any],
    trainer: dict[str, Any],
    config: dict[str, Any],
    versions: dict[str, Any],
    group: Any = None,
) -> Path:
    """Write a checkpoint into `folder` and return its path once it is on the disk.

    All ranks call it together, each with the tensors that it has (see `write_tensors`); the other arguments are rank
    0's. `group` is a `together.file_group`, for saving from another thread than the main one.

    Raises CheckpointError on all ranks, after removing what was written, if one of them fails (a full disk, say) or is
    gone.
    """
    group = group or main_group()
    final = folder / checkpoint_name(step)
    saving = folder / f"{_SAVING}{final.name}"

    def start() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir()

    def commit(files: dict[str, dict[str, Any]]) -> None:
        _check_all_there(saving, files)
        manifest = Manifest(
            step=step,
            sequences=sequences,
            identity=identity,
            trainer=trainer,
            config=config,
            versions=versions,
            files=files,
        )
        _write_and_flush(saving / MANIFEST, manifest.to_json())
        _flush_folder(saving)
        _put_in_place(saving, final)
        _flush_folder(folder)

    try:
        with comm.awaiting(f"saving of {final}"):
            on_first_rank(start, f"start of {final}", group)
            written = write_tensors(saving, tensors, group)
            described = on_every_rank(lambda: _describe(saving, written), f"hashing of {final}", group)
            files = {name: file for theirs in described for name, file in sorted(theirs.items())}
            on_first_rank(lambda: commit(files), f"commit of {final}", group)
    except Exception as error:
        _remove(saving, error, group)
        raise CheckpointError(f"checkpoint {final} could not be written: {reason(error)}") from error
    if comm.rank() == 0:
        _delete_leftovers(folder, _SAVING, _DELETING)
    return final


def _describe(saving: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    with naming_the_rank():
        return describe_files(saving / name for name in names)


def _check_all_there(saving: Path, files: dict[str, dict[str, Any]]) -> None:
    """Ranks on several machines need one file system: a manifest must not list what nobody will find."""
    for name, expected in files.items():
        if not (saving / name).is_file() or (saving / name).stat().st_size != expected["bytes"]:
            raise ValueError(f"{name}, which another rank has written, is not where rank 0 writes: not the same disk?")


def _remove(saving: Path, error: Exception, group: Any) -> None:
    """Remove what was written; if all ranks are there, it is gone for all of them on return."""

    def remove() -> None:
        shutil.rmtree(saving, ignore_errors=True)

    if isinstance(error, CollectiveError):  # the others may be anywhere
        if comm.rank() == 0:
            remove()
        return
    with contextlib.suppress(CollectiveError), comm.awaiting(f"removal of {saving}"):
        on_first_rank(remove, f"removal of {saving}", group)


def _put_in_place(saving: Path, final: Path) -> None:
    """Rename, after moving away what is there: a torn checkpoint, or the same step of an earlier try."""
    aside = final.with_name(f"{_DELETING}{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        final.rename(aside)
    try:
        saving.rename(final)
    except BaseException:
        if aside.exists():
            aside.rename(final)
        raise


def _write_and_flush(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_leftovers(folder: Path, *prefixes: str) -> None:
    for prefix in prefixes:
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def set_newer_aside(folder: Path, step: int) -> None:
    """Rename checkpoints after `step` to `superseded-*`: torn ones, and those of a try that is not continued.

    They would otherwise be taken for this try's. Nothing deletes them: a further one of the same step gets a number.
    """
    for path in find_checkpoints(folder):
        if int(path.name[5:]) > step:
            aside = folder / f"superseded-{path.name}"
            number = 2
            while aside.exists():
                aside = folder / f"superseded-{path.name}-{number}"
                number += 1
            logger.warning("resume: %s is set aside as %s", path, aside.name)
            path.rename(aside)


def prune_together(folder: Path, keep_last: int | None, group: Any = None) -> None:
    """`prune_checkpoints` after a save, by rank 0. All ranks call it together; `group` is as in `save_checkpoint`."""
    what = f"pruning of {folder}"
    with comm.awaiting(what):
        on_first_rank(lambda: prune_checkpoints(folder, keep_last), what, group)


def prune_checkpoints(folder: Path, keep_last: int | None) -> None:
    """Delete all but the newest keep_last checkpoints. A deletion that is cut short leaves no torn checkpoint.

    What a save has written so far stays, because the save may be under way in another thread.
    """
    if keep_last is not None:
        for path in find_checkpoints(folder)[keep_last:]:
            path.rename(folder / f"{_DELETING}{path.name}")
        _delete_leftovers(folder, _DELETING)
