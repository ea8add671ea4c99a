"""Checkpoints that are whole or not there.

A checkpoint is a folder `step_00000100`: tensors as safetensors files, written through `torch.distributed.checkpoint`
so that one process and many take the same path, and `manifest.json`, written last, with the size and SHA-256 of every
file. The folder is written under another name, flushed to the disk, and renamed into place: a crash at any moment
leaves either no folder of that name or a whole one. Nothing is ever unpickled.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.api
from torch import Tensor, nn

from cs336_basics.data import sha256_of_file

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")
_SAVING, _DELETING = ".saving-", ".deleting-"
_FILE_BYTES = 1 << 31  # the writer copies a whole file in memory, so files are kept to about this size


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those written before are untouched."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint is of, and the mark that it is whole."""

    step: int
    sequences: int
    """Sequences of the run consumed so far: the position in the data."""
    identity: dict[str, Any]
    """What a run must share to go on from here: architecture, tokenizer, data and seed."""
    trainer: dict[str, Any]
    """The loop's own small state: loss scale, skipped steps."""
    config: dict[str, Any]
    versions: dict[str, Any]
    files: dict[str, dict[str, Any]]
    """Per file its `bytes` and `sha256`."""
    format: int = _FORMAT

    def to_json(self) -> str:
        """The manifest as text, with a checksum of itself."""
        fields = dataclasses.asdict(self)
        return json.dumps({**fields, "checksum": _checksum(fields)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The manifest that `to_json` wrote. Raises ValueError for anything else."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
        if raw.get("format") != _FORMAT:
            raise ValueError(f"format {raw.get('format')!r}, this version reads format {_FORMAT}")
        if raw.pop("checksum", None) != _checksum(raw):
            raise ValueError("its checksum is wrong")
        names = {field.name for field in dataclasses.fields(cls)}
        if raw.keys() != names:
            raise ValueError(f"its fields are not {', '.join(sorted(names))}")
        manifest = cls(**raw)
        manifest._check_types()
        return manifest

    def _check_types(self) -> None:
        """Raise ValueError for what no run writes: a checksum says that a file is as it was written, not by whom."""
        counts: dict[str, Any] = {"step": self.step, "sequences": self.sequences}
        objects = {name: getattr(self, name) for name in ("identity", "trainer", "config", "versions", "files")}
        for name, value in objects.items():
            _require_type(isinstance(value, dict), name, value, "a JSON object")
        for name, file in self.files.items():
            _require_type(Path(name).name == name, "file name", name, "one without a folder")
            _require_type(isinstance(file, dict), f"files {name}", file, "a JSON object")
            _require_type(isinstance(file.get("sha256"), str), f"files {name} sha256", file.get("sha256"), "text")
            counts[f"files {name} bytes"] = file.get("bytes")
        _require_type(bool(self.files), "files", self.files, "the checkpoint's files, at least one")
        if self.trainer:  # nothing in what was imported, from which no loop goes on
            scaler = self.trainer.get("scaler")
            counts["trainer skipped_steps"] = self.trainer.get("skipped_steps")
            numbers = isinstance(scaler, dict) and all(type(value) in (int, float) for value in scaler.values())
            _require_type(numbers, "trainer scaler", scaler, "a JSON object of numbers")
        for name, value in counts.items():
            _require_type(type(value) is int and 0 <= value < 1 << 63, name, value, "an integer of at least 0")


def _require_type(condition: bool, name: str, value: Any, accepted: str) -> None:
    if not condition:
        shown = json.dumps(value)
        raise ValueError(f"its {name} is {shown if len(shown) < 80 else shown[:80] + '...'}: it must be {accepted}")


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint of a step."""
    return f"step_{step:08d}"


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    sequences: int,
    identity: dict[str, Any],
    trainer: dict[str, Any],
    config: dict[str, Any],
    versions: dict[str, Any],
) -> Path:
    """Write a checkpoint into `folder` and return its path once it is on the disk.

    Raises CheckpointError, after removing what was written, where that fails (a full disk, say).
    """
    final = folder / checkpoint_name(step)
    saving = folder / f"{_SAVING}{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir()
        write_tensors(saving, tensors)
        manifest = Manifest(
            step=step,
            sequences=sequences,
            identity=identity,
            trainer=trainer,
            config=config,
            versions=versions,
            files=_describe_files([path for path in saving.iterdir() if path.name != MANIFEST]),
        )
        _write_and_flush(saving / MANIFEST, manifest.to_json())
        _flush_folder(saving)
        _put_in_place(saving, final)
        _flush_folder(folder)
    except Exception as error:
        shutil.rmtree(saving, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} could not be written: {_reason(error)}") from error
    _delete_leftovers(folder)
    return final


def _put_in_place(saving: Path, final: Path) -> None:
    """Rename, after moving away what is there: a torn checkpoint, or the step of a try before this one."""
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


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors into a folder as flushed safetensors files of bounded size."""
    file_of: dict[str, int] = {}
    index, filled = 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > _FILE_BYTES:
            index, filled = index + 1, 0
        file_of[name] = index
        filled += tensor.nbytes
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of, save_distributed=True)
    with _single_process():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `into` in place from a checkpoint's tensors of the same names."""
    with _single_process():
        dcp.load(dict(into), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """torch.distributed.checkpoint without its warning of being alone, and with the errors it wraps as they were."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.api.CheckpointException as error:  # no Exception, and no cause: {rank: (exception, traceback)}
            raise next(iter(error.failures.values()))[0] from None


def tensor_shapes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and dtypes of a checkpoint's tensors."""
    metadata = dcp.HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in metadata.items()}  # type: ignore[union-attr]


def _describe_files(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    files = sorted(files)
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        hashes = list(pool.map(sha256_of_file, files))
    return {path.name: {"bytes": path.stat().st_size, "sha256": h} for path, h in zip(files, hashes, strict=True)}


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


def _reason(error: BaseException) -> str:
    """The operating system's own words where it is behind the error, however deep."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"


def _delete_leftovers(folder: Path) -> None:
    for path in (*folder.glob(f"{_SAVING}*"), *folder.glob(f"{_DELETING}*")):
        shutil.rmtree(path, ignore_errors=True)


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, whole or torn, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _STEP.fullmatch(p.name)), key=lambda p: int(p.name[5:]), reverse=True)


def verify_checkpoint(path: Path) -> Manifest:
    """Read the manifest and check every file against it. Raises ValueError naming the file that is missing or torn."""
    if not path.is_dir():
        raise ValueError(f"checkpoint {path} does not exist")
    if not (path / MANIFEST).is_file():
        raise ValueError(f"checkpoint {path} is torn: it has no {MANIFEST}")
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"checkpoint file {path / MANIFEST} cannot be read: {error}") from error
    if path.name != checkpoint_name(manifest.step) and _STEP.fullmatch(path.name):
        raise ValueError(f"checkpoint {path} is of step {manifest.step}, its manifest says")
    if unlisted := {file.name for file in path.glob("*.safetensors")} - manifest.files.keys():
        raise ValueError(
            f"checkpoint file {path / min(unlisted)} is not in the manifest"
        )  # and would be read unverified
    for name, expected in manifest.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"checkpoint file {file} is torn: it {found}, the manifest says {expected['bytes']} bytes")
    found_files = _describe_files(path / name for name in manifest.files)
    for name, expected in manifest.files.items():
        if found_files[name]["sha256"] != expected["sha256"]:
            raise ValueError(f"checkpoint file {path / name} is damaged: its SHA-256 is not the manifest's")
    return manifest


def newest_whole_checkpoint(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that is whole, or None. Warns of every newer one that is torn."""
    for path in find_checkpoints(folder):
        try:
            return path, verify_checkpoint(path)
        except (ValueError, OSError) as error:
            logger.warning("PASSED OVER: %s", error)
    return None


def check_identity(path: Path, manifest: Manifest, identity: dict[str, Any]) -> None:
    """Raise ValueError naming every field in which a run differs from the one that wrote the checkpoint."""
    names = sorted({*manifest.identity, *identity})
    differing = [
        f"{name} is {identity.get(name)!r} here and {manifest.identity.get(name)!r} there"
        for name in names
        if identity.get(name) != manifest.identity.get(name)
    ]
    if differing:
        raise ValueError(f"checkpoint {path} is of another run: {'; '.join(differing)}")


def set_newer_aside(folder: Path, step: int) -> None:
    """Rename checkpoints after `step` to `superseded-*`: torn ones, and those of a try that is not gone on with.

    They would otherwise be taken for this try's. Nothing deletes them but the next of the same name.
    """
    for path in find_checkpoints(folder):
        if int(path.name[5:]) > step:
            aside = folder / f"superseded-{path.name}"
            logger.warning("resume: %s is set aside as %s", path, aside.name)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def prune_checkpoints(folder: Path, keep_last: int | None) -> None:
    """Delete all but the newest keep_last checkpoints. A deletion that is cut short leaves no torn checkpoint."""
    if keep_last is not None:
        for path in find_checkpoints(folder)[keep_last:]:
            path.rename(folder / f"{_DELETING}{path.name}")
        _delete_leftovers(folder)


def collect_state(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of a run by name: `model.*`, `optimizer.PARAMETER.STATE` and the generators' states `rng.*`."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put what `collect_state` collected back: parameters in place, optimizer state, generators."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in tensor_shapes(path).items():
        group, _, key = name.partition(".")
        if group == "optimizer":
            where = parameters[key.rpartition(".")[0]].device if len(shape) else torch.device("cpu")
            tensors[name] = torch.empty(shape, dtype=dtype, device=where)
        elif group == "rng":
            tensors[name] = torch.empty(shape, dtype=dtype)
    tensors.update({f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    read_tensors(path, tensors)

    index_of = {parameter: i for i, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            parameter_name, _, key = name.removeprefix("optimizer.").rpartition(".")
            state.setdefault(index_of[parameters[parameter_name]], {})[key] = tensor
    # Through load_state_dict, because a fused optimizer wants its step counters on the device.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)
