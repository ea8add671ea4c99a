"""`flash_cuda` on a CPU: its sources, compiled for `cuda_emulator`, which stands for the GPU and its instructions.

A block's threads take turns, its copies are late, and the emulator watches every access of shared memory: a kernel that
reads too early, without a barrier, or beyond the end, fails here too.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cs336_systems.kernels.attention import flash_cuda_ampere, flash_cuda_build

EMULATOR = Path(__file__).parent / "cuda_emulator"
BUILT = Path(__file__).parents[2] / ".pytest_cache/emulated"
Change = tuple[str, str, str]
"""A source, a text in it, and its replacement."""


@contextlib.contextmanager
def emulated(*changes: Change) -> Iterator[None]:
    """A context in which `flash_cuda` runs CPU tensors in the emulator, with its sources changed as given.

    A fault that the emulator finds is the error of a launch, a RuntimeError.
    """

    def emulated_library(capability: object, *of: Any) -> Mapping[str, Any]:
        return library(changes, *of)

    with on_gpu((8, 0)), mock.patch.object(flash_cuda_ampere, "_library", emulated_library):
        yield


@contextlib.contextmanager
def on_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """A context in which tensors on the CPU count as tensors on a GPU."""
    stream = SimpleNamespace(cuda_stream=None)
    with (
        mock.patch.object(flash_cuda_build, "capability", return_value=capability),
        mock.patch.multiple(torch.cuda, device=contextlib.nullcontext, current_stream=lambda: stream),
    ):
        yield


@functools.cache
def library(changes: tuple[Change, ...], dtype: torch.dtype, head_size: int, exact: bool) -> Mapping[str, Any]:
    """The sources compiled with the emulator's instructions in the place of the GPU's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder, changes)
        of_kernels = flash_cuda_build.definitions(dtype, head_size, exact)
        objects = [compiled(folder, file, of_kernels) for file in ("forward.cu", "backward.cu")]
        linked = folder / "library.so"
        run(["g++", "-shared", *objects, compiled(folder, "emulator.cpp", []), "-o", linked], folder)
        return flash_cuda_build.functions_of(
            linked, {each: len(of_each) for each, of_each in flash_cuda_ampere.PARAMETERS.items()}
        )


def copy_sources(folder: Path, changes: tuple[Change, ...]) -> None:
    for sources in (flash_cuda_build.SOURCES, EMULATOR):  # the emulator's files replace ours
        shutil.copytree(sources, folder, dirs_exist_ok=True)
    for file, old, new in changes:
        text = (folder / file).read_text()
        assert text.count(old) >= 1, f"{file} has no {old!r}"
        (folder / file).write_text(text.replace(old, new))


def compiled(folder: Path, file: str, definitions: list[str]) -> Path:
    """An object of a source and the headers beside it, made once for all test processes."""
    command = ["g++", "-O1", "-std=c++17", "-w", "-fno-strict-aliasing", "-fPIC", *definitions, "-x", "c++", "-c", file]
    suffixes = (".h",) if file.endswith(".cpp") else (".h", ".cuh")  # the emulator does not depend on the kernels
    sources = [folder / file, *(path for path in sorted(folder.rglob("*")) if path.suffix in suffixes)]
    content = repr((command, [path.read_bytes() for path in sources]))
    made = BUILT / f"{hashlib.sha256(content.encode()).hexdigest()}.o"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        run([*command, "-o", half := made.with_suffix(f".{os.getpid()}")], folder)
        half.replace(made)
    return made


def run(command: list[Any], folder: Path) -> None:
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if built.returncode != 0:
        raise RuntimeError(built.stderr)
