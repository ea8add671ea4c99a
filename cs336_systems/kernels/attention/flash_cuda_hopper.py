"""FlashAttention for Hopper in CUDA C++, without a template library: the kernels of `csrc/hopper`.

The sources, in the order in which to read them. Each begins with an explanation:

  barriers.cuh    barriers that count bytes, and named barriers
  tensor_map.cuh  how the host describes tensors to TMA, which copies tiles
  tma.cuh         loads, stores and sums by TMA, and the fence that they need
  swizzle.cuh     tiles in shared memory, and the descriptors by which matrix products find them
  wgmma.cuh       matrix products of a warpgroup, in the background
  registers.cuh   registers moved from one warpgroup to another
  work.cuh        the problem, and its division into tiles
  forward.cu      O and the logsumexp
  backward.cu     dQ, dK and dV in one walk over the queries; backward.cuh has its sizes and its shared memory, sums.cuh
                  the kernels before and after it

They are compiled for compute capability 9.0 alone, once for each element type and head size (rounded up).
"""

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import flash_cuda_build as build
from .contract import Band, as_4d, can_use_tma, check_qkv, heads_in_cache, heads_on_hopper
from .function import Saved, new_gradients, new_outputs

CAPABILITY = (9, 0)
SOURCES = build.SOURCES / "hopper"
HEAD_SIZES = (64, 128)
"""The sizes that are compiled; TMA pads other heads with zeros to the next larger size."""
DTYPES = (torch.bfloat16, torch.float16)
FLAGS = ("-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-Werror,-warn-spills")
"""sm_90a has the matrix products of warpgroups. ptxas warns of products that wait for each other, and of spills."""
PARAMETERS = {"hopper_forward": 9, "hopper_backward": 15}
"""The numbers of parameters of the functions in csrc/hopper, all pointers."""


def check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None) -> None:
    """Raise a ValueError for a call that these kernels do not serve."""
    if (capability := build.capability(q.device)) != CAPABILITY:
        found = ".".join(map(str, capability))
        raise ValueError(f"q is on {q.device}, of compute capability {found}: flash_cuda's Hopper kernels need 9.0")
    check_qkv(q, k, v, is_causal, dtypes=DTYPES, max_head_size=HEAD_SIZES[-1])


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """o and the logsumexp of the scaled scores, in nats."""
    o, logsumexp = new_outputs(q)
    written = _written(o)
    starts = None if band is None or band.starts is None else band.starts.contiguous()
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    _call("hopper_forward", _problem(q, k, k, is_causal, band), q, k, v, written, logsumexp, starts, counter)
    _copy_back(o, written)
    return o, logsumexp


def backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; those that are not needed have no elements."""
    q, k, v, o, logsumexp, is_causal, band = saved
    gradients = new_gradients(q, k, v, True, True)
    written = [_written(x) for x in gradients]
    ends = None if band is None or band.ends is None else band.ends.contiguous()
    head_size = _built_for(q)
    tile = 8192 // head_size  # QUERIES of csrc/hopper/backward.cuh
    rows = q.shape[:-2].numel() * -(-q.shape[-2] // tile) * tile
    initial, sums = (q.new_empty(rows * columns, dtype=torch.float32) for columns in (2, head_size))
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    problem = _problem(q, k, q, is_causal, band)
    _call("hopper_backward", problem, q, k, v, o, dO, *written, logsumexp, ends, initial, sums, counter)
    for x, of_x in zip(gradients, written, strict=True):
        _copy_back(x, of_x)
    dq, dk, dv = gradients
    return dq if need_dq else q.new_empty(0), *((dk, dv) if need_dkv else (k.new_empty(0), v.new_empty(0)))


def _problem(q: Tensor, k: Tensor, looped_over: Tensor, is_causal: bool, band: Band | None) -> "_Problem":
    """looped_over: q or k, the one whose rows each block loops over."""
    batch, heads, n_q, head_size = as_4d(q).shape
    key_heads, n_k = as_4d(k).shape[1:3]
    multiprocessors, cache = _card(q.device)
    tiled = q if looped_over is k else k
    together = heads_on_hopper(heads_in_cache(as_4d(tiled), as_4d(looped_over), cache // 8), is_causal)
    window = 2**31 - 1 if band is None or band.window is None else min(band.window, n_k)
    return _Problem(batch, heads, key_heads, n_q, n_k, head_size, is_causal, window, together, multiprocessors)


def _call(name: str, problem: "_Problem", *tensors: Tensor | None) -> None:
    """Call a function of csrc/hopper on the current stream: tensors (..., N, D) as views, others as pointers."""
    q = tensors[0]
    assert q is not None
    arguments: list[Any] = []
    for x in tensors:
        if x is None:
            arguments.append(None)
        elif x.dtype == q.dtype:
            arguments.append(ctypes.byref(build.View.of(_movable(as_4d(x)))))
        else:
            arguments.append(x.data_ptr())
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        error = _library(q.dtype, _built_for(q))[name](ctypes.byref(problem), *arguments, stream)
    if error is not None:
        raise RuntimeError(f"{name} was not launched: {error.decode()}")


def _built_for(q: Tensor) -> int:
    return next(size for size in HEAD_SIZES if size >= q.shape[-1])


def _movable(x: Tensor) -> Tensor:
    """x, or a copy if TMA cannot move it."""
    return x if can_use_tma(x) else _padded(x).copy_(x)


def _written(x: Tensor) -> Tensor:
    """The tensor that a kernel writes in the place of x: x itself, if TMA can move it."""
    x = as_4d(x)
    return x if can_use_tma(x) else _padded(x)


def _copy_back(x: Tensor, written: Tensor) -> None:
    if written.data_ptr() != x.data_ptr():
        as_4d(x).copy_(written)


def _padded(x: Tensor) -> Tensor:
    """An uninitialised tensor of x's shape whose rows begin at multiples of 16 bytes."""
    return x.new_empty(*x.shape[:-1], -(-x.shape[-1] // 8) * 8)[..., : x.shape[-1]]


@functools.cache
def _card(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors and the bytes of the L2 cache."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.L2_cache_size


class _Problem(ctypes.Structure):
    """`Problem` of csrc/hopper/work.cuh."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "batch", "heads", "key_heads", "n_q", "n_k", "head_size", "is_causal", "window", "heads_together", "blocks"
        )
    )  # fmt: skip


@functools.cache
def _library(dtype: torch.dtype, head_size: int) -> Mapping[str, build.Launcher]:
    """The functions of csrc/hopper, compiled if necessary."""
    flags = (*FLAGS, *build.definitions(dtype, head_size))
    name = f"cs336_flash_cuda_sm90a_{build.ELEMENTS[dtype].strip('_')}_{head_size}"
    path = build.compiled(name, (SOURCES / "forward.cu", SOURCES / "backward.cu"), flags)
    return build.functions_of(path, PARAMETERS)
