"""`flash_cuda` on a CPU with its kernels for Hopper: compiled for `cuda_emulator/hopper`, which stands for the GPU."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import torch

from cs336_systems.kernels.attention import flash_cuda_build, flash_cuda_hopper
from tests.kernels.emulated_flash_cuda import Change, compiled, copy_sources, on_gpu, run

BLOCKS = 2
"""As many as multiprocessors. The first one takes nearly all tiles, because blocks run one after the other."""


@contextlib.contextmanager
def emulated(*changes: Change) -> Iterator[None]:
    """A context in which `flash_cuda` runs CPU tensors in the emulator, with its sources changed as given.

    A fault that the emulator finds is the error of a launch, a RuntimeError.
    """
    card, made = lambda device: (BLOCKS, 2**25), functools.partial(library, changes)
    with on_gpu((9, 0)), mock.patch.multiple(flash_cuda_hopper, _card=card, _library=made):
        yield


@functools.cache
def library(changes: tuple[Change, ...], dtype: torch.dtype, head_size: int) -> Mapping[str, flash_cuda_build.Launcher]:
    """The sources compiled with the emulator's units in the place of the GPU's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder, changes)
        definitions = flash_cuda_build.definitions(dtype, head_size)
        kernels = [compiled(folder, f"hopper/{name}.cu", definitions) for name in ("forward", "backward")]
        linked = folder / "library.so"
        run(["g++", "-shared", *kernels, *machine(folder), "-o", linked], folder)
        return flash_cuda_build.functions_of(linked, flash_cuda_hopper.PARAMETERS)


def machine(folder: Path) -> list[Path]:
    """The objects of the emulator."""
    return [compiled(folder, f"hopper/{name}.cpp", ["-O3", "-march=native"]) for name in ("machine", "products", "tma")]
