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

from cs336_systems.kernels.attention import flash_cuda as module

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

    stream = SimpleNamespace(cuda_stream=None)
    with (
        mock.patch.multiple(module, _check=module._check_supported, _capability=str, _library=emulated_library),
        mock.patch.multiple(torch.cuda, device=contextlib.nullcontext, current_stream=lambda: stream),
    ):
        yield


@functools.cache
def library(changes: tuple[Change, ...], dtype: torch.dtype, head_size: int, exact: bool) -> Mapping[str, Any]:
    """The sources compiled with the emulator's instructions in the place of the GPU's, once for all test processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (
            *module._SOURCES.iterdir(),
            *EMULATOR.iterdir(),
        ):  # the emulator's files replace ours
            shutil.copy(source, folder)
        for file, old, new in changes:
            text = (folder / file).read_text()
            assert text.count(old) >= 1, f"{file} has no {old!r}"
            (folder / file).write_text(text.replace(old, new))
        flags = ["-O1", "-std=c++17", "-w", "-fno-strict-aliasing", "-fPIC", "-shared"]
        files = ["-x", "c++", "forward.cu", "backward.cu", "emulator.cpp", "-o", "library.so"]
        command = ["g++", *flags, *module.definitions(dtype, head_size, exact), *files]
        sources = [path.read_bytes() for path in sorted(folder.iterdir())]
        made = BUILT / f"{hashlib.sha256(repr((command, sources)).encode()).hexdigest()}.so"
        if not made.exists():
            built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if built.returncode != 0:
                raise RuntimeError(built.stderr)
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "library.so", half := made.with_suffix(f".{os.getpid()}"))
            half.replace(made)
        return module._functions(made)
