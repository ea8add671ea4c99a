"""`flash_cuda_hopper` on a CPU: its sources, compiled for `cuda_emulator/hopper`, which stands for Hopper's units."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from cs336_systems.kernels.attention import flash_cuda, flash_cuda_hopper
from tests.kernels.emulated_flash_cuda import Change, compiled, copy_sources, run

BLOCKS = 2
"""As many as multiprocessors. The first one takes nearly all tiles, because blocks run one after the other."""


@contextlib.contextmanager
def emulated(*changes: Change) -> Iterator[None]:
    """A context in which `flash_cuda_hopper` runs CPU tensors in the emulator, with its sources changed as given.

    A fault that the emulator finds is the error of a launch, a RuntimeError.
    """
    module = flash_cuda_hopper
    stream = SimpleNamespace(cuda_stream=None)
    with (
        mock.patch.multiple(
            module,
            _check=module._check_supported,
            _card=lambda device: (BLOCKS, 2**25),
            _library=functools.partial(library, changes),
        ),
        mock.patch.multiple(torch.cuda, device=contextlib.nullcontext, current_stream=lambda: stream),
    ):
        yield


@functools.cache
def library(changes: tuple[Change, ...], dtype: torch.dtype, head_size: int) -> Mapping[str, flash_cuda.Launcher]:
    """The sources compiled with the emulator's units in the place of the GPU's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder, changes)
        definitions = flash_cuda.definitions(dtype, head_size)
        kernels = [compiled(folder, f"hopper/{name}.cu", definitions) for name in ("forward", "backward")]
        linked = folder / "library.so"
        run(["g++", "-shared", *kernels, *machine(folder), "-o", linked], folder)
        return flash_cuda_hopper.functions_of(linked)


def machine(folder: Path) -> list[Path]:
    """The objects of the emulator."""
    return [compiled(folder, f"hopper/{name}.cpp", ["-O3", "-march=native"]) for name in ("machine", "products", "tma")]
