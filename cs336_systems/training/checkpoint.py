"""Checkpoints that are whole or absent.

A checkpoint is a folder `step_00000100` of safetensors files and `manifest.json`. Every rank writes its own tensors.
Then rank 0 writes the manifest, with the size and SHA-256 of every file, and renames the folder into place, so a crash
at any moment leaves a whole folder of that name or none. All ranks call `save_checkpoint` and `prune_together`
together. The other functions communicate nothing.
"""

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..parallel import comm
from ..parallel.failure import CollectiveError
from .manifest import MANIFEST, Manifest, checkpoint_name, describe_files, find_checkpoints
from .tensor_files import Rows, write_tensors
from .together import main_group, naming_the_rank, on_every_rank, on_first_rank, reason

logger = logging.getLogger(__name__)

_SAVING, _DELETING = ".saving-", ".deleting-"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Earlier ones are untouched."""


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor | Rows], manifest: Manifest, group: Any = None) -> Path:
    """Write a checkpoint into `folder` and return its path once it is on the disk.

    All ranks call it together, each with its own tensors (see `write_tensors`). `group` is a `together.file_group`, for
    saving in a thread. If one rank fails or is gone, rank 0 removes the unfinished folder, and all raise
    CheckpointError.
    """
    group = group or main_group()
    final = folder / checkpoint_name(manifest.step)
    saving = folder / f"{_SAVING}{final.name}"

    def remove() -> None:
        shutil.rmtree(saving, ignore_errors=True)

    def start() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        remove()
        saving.mkdir()

    def describe() -> dict[str, dict[str, Any]]:
        with naming_the_rank():
            return describe_files(saving / name for name in written)

    def commit() -> None:
        files = {name: file for theirs in described for name, file in sorted(theirs.items())}
        _commit(saving, final, dataclasses.replace(manifest, files=files))

    try:
        with comm.awaiting(f"saving of {final}"):
            on_first_rank(start, f"start of {final}", group)
            written = write_tensors(saving, tensors, group)
            described = on_every_rank(describe, f"hashing of {final}", group)
            on_first_rank(commit, f"commit of {final}", group)
    except Exception as error:
        if isinstance(error, CollectiveError):  # a rank is gone: do not wait for the others
            if comm.rank() == 0:
                remove()
        else:
            with contextlib.suppress(CollectiveError), comm.awaiting(f"removal of {saving}"):
                on_first_rank(remove, f"removal of {saving}", group)
        raise CheckpointError(f"checkpoint {final} could not be written: {reason(error)}") from error
    if comm.rank() == 0:
        _delete_leftovers(folder, _SAVING, _DELETING)
    return final


def _commit(saving: Path, final: Path, manifest: Manifest) -> None:
    """Write the manifest, flush everything to the disk, and give the folder its name.

    An earlier checkpoint of this step, whole or torn, is moved away first, and back if the renaming fails.
    """
    for name, file in manifest.files.items():  # ranks on several machines need one file system
        if not (saving / name).is_file() or (saving / name).stat().st_size != file["bytes"]:
            raise ValueError(f"{name}, which another rank has written, is not where rank 0 writes: not the same disk?")
    with (saving / MANIFEST).open("w") as written:
        written.write(manifest.to_json())
        written.flush()
        os.fsync(written.fileno())
    _flush_folder(saving)
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
    _flush_folder(final.parent)


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
    """Rename checkpoints after `step`, whole or torn, to `superseded-*`, because a resumed run makes new ones.

    Nothing deletes them. If the name is taken, it gets a number.
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
    """`prune_checkpoints` on rank 0, after a save. All ranks call it together; `group` is as in `save_checkpoint`."""
    with comm.awaiting(f"pruning of {folder}"):
        on_first_rank(lambda: prune_checkpoints(folder, keep_last), f"pruning of {folder}", group)


def prune_checkpoints(folder: Path, keep_last: int | None) -> None:
    """Delete all but the newest keep_last checkpoints. An interrupted deletion leaves no torn checkpoint.

    An unfinished save stays, because another thread may be writing it.
    """
    if keep_last is not None:
        for path in find_checkpoints(folder)[keep_last:]:
            path.rename(folder / f"{_DELETING}{path.name}")
        _delete_leftovers(folder, _DELETING)
