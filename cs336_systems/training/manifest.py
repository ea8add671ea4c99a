"""The manifest of a checkpoint: describes the run, and proves that every file is whole. Nothing here communicates."""

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cs336_basics.files import sha256_of_file
from cs336_basics.shape import ModelShape

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FORMAT = 2
"""Since 2, a bfloat16 weight may be the upper half of its master (`optimizer.halves`)."""
_HASHED = {"tokenizer": "the tokenizer differs", "training tokens": "the training tokens differ"}
"""Facts of which a manifest has hashes, and how a message tells a difference."""
_STEP = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json. A checkpoint without one is torn."""

    step: int
    sequences: int
    """Sequences of the run consumed so far: the position in the data."""
    identity: dict[str, Any]
    """The facts that a run must share to go on from here: architecture, optimizer, tokenizer, training tokens, seed."""
    trainer: dict[str, Any]
    """The trainer's small state: loss scale, skipped steps."""
    config: dict[str, Any]
    versions: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """`bytes` and `sha256` of each file, by name. `save_checkpoint` fills them in."""
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
            raise ValueError("it does not hold a JSON object")
        if raw.get("format") not in range(1, _FORMAT + 1):
            raise ValueError(f"format {raw.get('format')!r}, this version reads formats up to {_FORMAT}")
        if raw.pop("checksum", None) != _checksum(raw):
            raise ValueError("its checksum is wrong")
        return cls(**raw)


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint of a step."""
    return f"step_{step:08d}"


def describe_files(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The manifest's `files`: size and SHA-256 of each file, by name."""
    files = sorted(files)
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        hashes = list(pool.map(sha256_of_file, files))
    return {path.name: {"bytes": path.stat().st_size, "sha256": h} for path, h in zip(files, hashes, strict=True)}


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in `folder`, whole or torn, newest step first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _STEP.fullmatch(p.name)), key=lambda p: int(p.name[5:]), reverse=True)


def verify_checkpoint(path: Path) -> Manifest:
    """Read the manifest and check every file against it. Raises ValueError naming a file that is missing or damaged."""
    if not path.is_dir():
        raise ValueError(f"checkpoint {path} does not exist")
    if not (path / MANIFEST).is_file():
        raise ValueError(f"checkpoint {path} is torn: it has no {MANIFEST}")
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"checkpoint file {path / MANIFEST} cannot be read: {error}") from error
    if unlisted := {file.name for file in path.glob("*.safetensors")} - manifest.files.keys():
        raise ValueError(f"checkpoint file {path / min(unlisted)} is not in the manifest")
    for name, expected in manifest.files.items():
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size != expected["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise ValueError(f"checkpoint file {file} is torn: it {found}, the manifest says {expected['bytes']} bytes")
    found_files = describe_files(path / name for name in manifest.files)
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


def check_identity(
    path: Path,
    manifest: Manifest,
    identity: dict[str, Any],
    why: Iterable[str] = (),
    partly: bool = False,
) -> None:
    """Raise ValueError naming every field of the identity in which a run differs from the checkpoint's.

    why: other differences that may be the cause, or what to do. The message lists them too.
    partly: compare only the fields of `identity`.
    """
    # Older checkpoints lack the newer fields.
    defaults = {f"model.{name}": default for name, default in ModelShape.defaults().items()}
    defaults["optimizer.name"] = "adamw"
    here, there = defaults | identity, defaults | manifest.identity
    differing = [
        _HASHED.get(name, f"{name} is {here.get(name)!r} here and {there.get(name)!r} there")
        for name in sorted(identity if partly else {*here, *there})
        if here.get(name) != there.get(name)
    ]
    if differing:
        raise ValueError(f"checkpoint {path} is of another run: {'; '.join([*differing, *why])}")
