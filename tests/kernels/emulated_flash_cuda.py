"""`flash_cuda` on a CPU: its sources, compiled for `cuda_emulator`, which stands for the GPU and its instructions.

A block's threads take turns, its copies are late, and every access of shared memory is watched: a kernel that reads
what is not there yet, or without a barrier, or beyond the end, fails here too.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cs336_systems.kernels.attention import flash_cuda as module
from cs336_systems.kernels.attention.function import Saved

EMULATOR = Path(__file__).parent / "cuda_emulator"
Change = tuple[str, str, str]
"""In a source, what there is and what is put in its place."""


class EmulatedFlashCuda(torch.autograd.Function):
    """Its `apply` raises RuntimeError with the first thing that the emulator found wrong."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        module._check_served(q, k, v, is_causal)
        with emulated():
            o, logsumexp = module.forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        (dO,) = gradients
        need_dq, need_dk, need_dv, _ = ctx.needs_input_grad
        if 0 in dO.shape or 0 in ctx.saved_tensors[1].shape:  # as for a GPU nothing is launched
            return (*(torch.zeros_like(x) for x in ctx.saved_tensors[:3]), None)
        with emulated():
            dq, dk, dv = module.backward(dO, Saved(*ctx.saved_tensors, ctx.is_causal), need_dq, need_dk or need_dv)
        return dq if need_dq else None, dk if need_dk else None, dv if need_dv else None, None


def emulated(*changes: Change) -> Any:
    """Where calls of the kernels are the emulator's, of sources with some changes."""
    return mock.patch.multiple(module, _check=module._check_served, _call=functools.partial(_call, changes))


def _call(
    changes: tuple[Change, ...],
    name: str,
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    *arguments: module._View | int | None,
) -> None:
    exact = q.dtype == torch.float32 and not module.allows_tf32()
    built_for = next(size for size in module._HEAD_SIZES if size >= q.shape[-1])
    function = getattr(library(q.dtype, built_for, exact, changes), name)
    function.restype = ctypes.c_char_p
    batch, heads, n_q, head_size = module.as_4d(q).shape
    sizes = module._Sizes(batch, heads, n_q, k.shape[-2], head_size, is_causal)
    pointers = (ctypes.byref(x) if isinstance(x, module._View) else ctypes.c_void_p(x) for x in arguments)
    if (error := function(ctypes.byref(sizes), *pointers, None)) is not None:
        raise RuntimeError(f"{name}: {error.decode()}")


@functools.cache
def library(dtype: torch.dtype, head_size: int, exact: bool, changes: tuple[Change, ...] = ()) -> ctypes.CDLL:
    """The sources compiled with the emulator's instructions in the place of the GPU's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for source in (*module._SOURCES.iterdir(), *EMULATOR.iterdir()):  # of one name the emulator's
            shutil.copy(source, folder)
        for file, old, new in changes:
            text = (folder / file).read_text()
            assert text.count(old) >= 1, f"{file} has no {old!r}"
            (folder / file).write_text(text.replace(old, new))
        flags = ["-O2", "-std=c++17", "-w", "-fno-strict-aliasing", "-fPIC", "-shared"]
        files = ["-x", "c++", "forward.cu", "backward.cu", "emulator.cpp", "-o", "library.so"]
        command = ["g++", *flags, *module.definitions(dtype, head_size, exact), *files]
        built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(built.stderr)
        return ctypes.CDLL(str(folder / "library.so"))
