"""FlashAttention-2 (Dao 2023) in CUDA C++ on the tensor cores of compute capability 8.0 and later: launches `csrc`.

The sources, to be read in this order:

  instructions.cuh  the GPU's instructions for matrix products and copies, and which lane holds which element
  products.cuh      float32 products composed of several of these
  rows.cuh          sums over the lanes of a row
  problem.cuh       tensors and sizes, as they are passed here
  tiles.cuh         tiles in shared memory and the swizzle of their rows, products of tiles, loads and stores
  forward.cu        O and the logsumexp
  backward.cu       dQ, dK and dV, without atomic additions
  launch.cuh        the launch and its errors

They are compiled once for each element type, precision of float32, head size (rounded up) and architecture. This takes
seconds.
"""

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...machine.hardware import allows_tf32
from . import flash_cuda_build as build
from .contract import Band, as_4d, check_qkv
from .function import Saved, new_gradients, new_outputs

DTYPES = tuple(build.ELEMENTS)
HEAD_SIZES = (32, 64, 96, 128, 256)
"""The sizes that are compiled; other heads are padded with zeros to the next larger size."""
PARAMETERS = {
    "flash_forward": ("sizes", "q", "k", "v", "o", "logsumexp", "stream"),
    "flash_backward": ("sizes", "q", "k", "v", "o", "d_o", "logsumexp", "statistics", "dq", "dk", "dv", "stream"),
}
"""The parameters of the functions in csrc, all pointers, in order."""


def check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None) -> None:
    """Raise a ValueError for a call that these kernels do not serve."""
    if (capability := build.capability(q.device)) < (8, 0):
        found = ".".join(map(str, capability))
        raise ValueError(f"q is on {q.device}, of compute capability {found}: flash_cuda needs 8.0 or later")
    name = "flash_cuda without its Hopper kernels"
    check_qkv(q, k, v, is_causal, dtypes=DTYPES, max_head_size=HEAD_SIZES[-1], equal_heads=name)
    if band is not None:
        given = "documents are given" if band.window is None else f"window is {band.window}"
        raise ValueError(f"{given}: {name} serves neither windows nor documents")


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """o and the logsumexp of the scaled scores, in nats."""
    o, logsumexp = new_outputs(q)
    _call("flash_forward", is_causal, q=q, k=k, v=v, o=o, logsumexp=logsumexp)
    return o, logsumexp


def backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; those that are not needed have no elements."""
    q, k, v, o, logsumexp, is_causal, _ = saved
    dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
    statistics = q.new_empty(*logsumexp.shape, 2, dtype=torch.float32)
    tensors = dict(q=q, k=k, v=v, o=o, d_o=dO, logsumexp=logsumexp, statistics=statistics, dq=dq, dk=dk, dv=dv)
    _call("flash_backward", is_causal, **tensors)
    return dq, dk, dv


class _Sizes(ctypes.Structure):
    """`Sizes` of csrc/problem.cuh."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "heads", "n_q", "n_k", "head_size", "is_causal"))


def _call(name: str, is_causal: bool, **tensors: Tensor) -> None:
    """Call a function of csrc on the current stream of q's device. A tensor without elements becomes a null pointer."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, n_q, head_size = as_4d(q).shape
    sizes = _Sizes(batch, heads, n_q, k.shape[-2], head_size, is_causal)
    built_for = next(size for size in HEAD_SIZES if size >= head_size)
    exact = q.dtype == torch.float32 and not allows_tf32()
    function = _library(build.capability(q.device), q.dtype, built_for, exact)[name]
    arguments: dict[str, Any] = {"sizes": ctypes.byref(sizes)}
    for each, x in tensors.items():
        if each in ("logsumexp", "statistics"):
            arguments[each] = x.data_ptr()
        else:
            arguments[each] = ctypes.byref(build.View.of(x)) if x.numel() else None
    with torch.cuda.device(q.device):
        arguments["stream"] = torch.cuda.current_stream().cuda_stream
        error = function(*(arguments[parameter] for parameter in PARAMETERS[name]))
    if error is not None:
        raise RuntimeError(f"{name} was not launched: {error.decode()}")


@functools.cache
def _library(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, exact: bool = False
) -> Mapping[str, build.Launcher]:
    """The functions of the library for one architecture and `definitions`, compiled if necessary."""
    architecture = "".join(map(str, capability))
    element = build.ELEMENTS[dtype].strip("_")
    name = f"cs336_flash_cuda_sm{architecture}_{element}_{head_size}{'_exact' if exact else ''}"
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    sources = (build.SOURCES / "forward.cu", build.SOURCES / "backward.cu")
    path = build.compiled(name, sources, (target, *build.definitions(dtype, head_size, exact)))
    return build.functions_of(path, {each: len(parameters) for each, parameters in PARAMETERS.items()})
