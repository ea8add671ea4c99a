"""FlashAttention for Hopper in CUDA C++, without a template library: the kernels of `csrc/hopper`.

The sources, to be read in this order, each beginning with an explanation:

  barriers.cuh    barriers that count bytes, and named barriers
  tensor_map.cuh  tensors as TMA, the copy engine, knows them
  tma.cuh         loads, stores and sums by TMA, and the fence that they need
  swizzle.cuh     tiles in shared memory, and the descriptors by which matrix products read them
  wgmma.cuh       matrix products of a warpgroup, in the background
  registers.cuh   registers moved from one warpgroup to another
  work.cuh        the problem, and its division into tiles
  forward.cu      O and the logsumexp
  backward.cu     dQ, dK and dV in one walk over the queries

They are compiled on first use, as those of `flash_cuda` are, for compute capability 9.0 alone. `flash_cuda` runs them
where the environment variable CS336_FLASH_CUDA is "hopper": no GPU has measured them yet.
"""

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_basics.attention import Documents

from . import flash_cuda
from .contract import Band, as_4d, band_of, can_use_tma, check_qkv, group_size
from .flash_torch import compiled_backward
from .function import Saved, empty_outputs, flash_function, new_gradients, new_outputs

SOURCES = flash_cuda.SOURCES / "hopper"
HEAD_SIZES = (64, 128)
"""The sizes that are compiled; TMA pads other heads with zeros to the next larger size."""
DTYPES = (torch.bfloat16, torch.float16)
FLAGS = ("-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-Werror,-warn-spills")
"""sm_90a has the matrix products of warpgroups. ptxas warns of products that wait for each other, and of spills."""
_PARAMETERS = {"hopper_forward": 9, "hopper_backward": 15}
"""The numbers of parameters of the functions in csrc/hopper, all pointers."""


def flash_cuda_hopper(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... N_q D"]:
    """softmax(q k^T / sqrt(D)) v for bfloat16 and float16, D up to 128, any lengths, strides and grouped heads.

    Scores, softmax and accumulators are float32; probabilities are rounded to q's type before they multiply v. Tensors
    that TMA cannot move are copied. Blocks add to dQ in any order, so its last bits differ from run to run; with
    `torch.use_deterministic_algorithms(True)` other kernels compute the gradients, the same bits every time.

    Raises ValueError for arguments it does not accept and RuntimeError if the kernels cannot be compiled.
    """
    return FlashAttentionCudaHopper.call(q, k, v, is_causal, band_of(window, documents))


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """o and the logsumexp of the scaled scores, in nats."""
    _check(q, k, v, is_causal)
    if (outputs := empty_outputs(q, k)) is not None:
        return outputs
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
    if torch.are_deterministic_algorithms_enabled():
        is_plain = band is None and group_size(q, k) == 1
        return (flash_cuda.backward if is_plain else compiled_backward)(dO, saved, need_dq, need_dkv)
    gradients = new_gradients(q, k, v, True, True)
    written = [_written(x) for x in gradients]
    ends = None if band is None or band.ends is None else band.ends.contiguous()
    head_size = _built_for(q)
    rows = q.shape[:-2].numel() * -(-q.shape[-2] // 64) * 64
    starts, sums = (q.new_empty(rows * columns, dtype=torch.float32) for columns in (2, head_size))
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    problem = _problem(q, k, q, is_causal, band)
    _call("hopper_backward", problem, q, k, v, o, dO, *written, logsumexp, ends, starts, sums, counter)
    for x, of_x in zip(gradients, written, strict=True):
        _copy_back(x, of_x)
    dq, dk, dv = gradients
    return dq if need_dq else q.new_empty(0), *((dk, dv) if need_dkv else (k.new_empty(0), v.new_empty(0)))


def _problem(q: Tensor, k: Tensor, looped_over: Tensor, is_causal: bool, band: Band | None) -> "_Problem":
    """looped_over: one of the two tensors that each block reads whole, of which the L2 cache should hold some heads."""
    batch, heads, n_q, head_size = as_4d(q).shape
    key_heads, n_k = as_4d(k).shape[1:3]
    multiprocessors, cache = _card(q.device)
    head_bytes = 2 * looped_over.shape[-2] * head_size * q.element_size()
    tiled_heads, looped_heads = (heads, key_heads) if looped_over is k else (key_heads, heads)
    together = max(4, cache // 8 // head_bytes * tiled_heads // looped_heads)
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
            arguments.append(ctypes.byref(flash_cuda.View.of(_movable(as_4d(x)))))
        else:
            arguments.append(x.data_ptr())
    with torch.cuda.device(q.device):
        stream = torch.cuda.current_stream().cuda_stream
        error = _library(q.dtype, _built_for(q))[name](ctypes.byref(problem), *arguments, stream)
    if error is not None:
        raise RuntimeError(f"{name} was not launched: {error.decode()}")


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    _check_supported(q, k, v, is_causal)
    if q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}: flash_cuda_hopper needs it on a CUDA device")
    capability = torch.cuda.get_device_capability(q.device)
    if capability != (9, 0):
        found = ".".join(map(str, capability))
        raise ValueError(f"q is on {q.device}, of compute capability {found}: flash_cuda_hopper needs 9.0")


def _check_supported(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    check_qkv(q, k, v, is_causal, dtypes=DTYPES, max_head_size=HEAD_SIZES[-1])
    flash_cuda.check_lengths(q, k)


FlashAttentionCudaHopper = flash_function("flash_cuda_hopper", forward, backward, _check_supported)


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
    """`Problem` of csrc/hopper/forward.cu."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "batch", "heads", "key_heads", "n_q", "n_k", "head_size", "is_causal", "window", "heads_together", "blocks"
        )
    )  # fmt: skip


@functools.cache
def _library(dtype: torch.dtype, head_size: int) -> Mapping[str, flash_cuda.Launcher]:
    """The functions of csrc/hopper, compiled if necessary."""
    flags = (*FLAGS, *flash_cuda.definitions(dtype, head_size))
    name = f"cs336_flash_cuda_sm90a_{flash_cuda.ELEMENTS[dtype].strip('_')}_{head_size}"
    return functions_of(flash_cuda.compiled(name, (SOURCES / "forward.cu", SOURCES / "backward.cu"), flags))


def functions_of(path: Path) -> Mapping[str, flash_cuda.Launcher]:
    """The functions of a compiled library."""
    library = ctypes.CDLL(str(path))
    for name, parameters in _PARAMETERS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * parameters, ctypes.c_char_p
    return {name: getattr(library, name) for name in _PARAMETERS}
