"""FlashAttention for Hopper in CUDA C++, without a template library: the forward pass of `csrc/hopper/forward.cu`.

The sources, to be read in this order, each beginning with an explanation:

  barriers.cuh    barriers that count bytes, and named barriers
  tensor_map.cuh  tensors as TMA, the copy engine, knows them
  tma.cuh         loads, stores and sums by TMA, and the fence that they need
  swizzle.cuh     tiles in shared memory, and the descriptors by which matrix products read them
  wgmma.cuh       matrix products of a warpgroup, in the background
  registers.cuh   registers moved from one warpgroup to another
  forward.cu      the kernel

They are compiled on first use, as those of `flash_cuda` are, for compute capability 9.0 alone. `flash_cuda` runs them
where the environment variable CS336_FLASH_CUDA is "hopper". There is no backward pass yet: gradients come from
`flash_cuda`'s kernels, or from `flash_torch`'s formulas if there are windows, documents or grouped heads.
"""

import ctypes
import functools
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_basics.attention import Documents

from . import flash_cuda
from .contract import Band, as_4d, band_of, can_use_tma, check_qkv, group_size
from .flash_torch import compiled_backward
from .function import Saved, empty_outputs, flash_function, new_outputs

SOURCES = flash_cuda.SOURCES / "hopper"
HEAD_SIZES = (64, 128)
"""The sizes that are compiled; TMA pads other heads with zeros to the next larger size."""
DTYPES = (torch.bfloat16, torch.float16)
FLAGS = ("-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-Werror,-warn-spills")
"""sm_90a has the matrix products of warpgroups. ptxas warns of products that wait for each other, and of spills."""
_PARAMETERS = ("problem", "q", "k", "v", "o", "logsumexp", "starts", "counter", "stream")


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
    that TMA cannot move are copied. The result has the same bits every time.

    Raises ValueError for arguments it does not accept and RuntimeError if the kernels cannot be compiled.
    """
    return FlashAttentionCudaHopper.call(q, k, v, is_causal, band_of(window, documents))


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """o and the logsumexp of the scaled scores, in nats."""
    _check(q, k, v, is_causal)
    if (outputs := empty_outputs(q, k)) is not None:
        return outputs
    o, logsumexp = new_outputs(q)
    views = {name: _movable(as_4d(x)) for name, x in (("q", q), ("k", k), ("v", v))}
    written = as_4d(o) if can_use_tma(as_4d(o)) else _padded(as_4d(o))
    batch, heads, n_q, head_size = views["q"].shape
    key_heads, n_k = views["k"].shape[1:3]
    multiprocessors, cache = _card(q.device)
    in_cache = cache // 8 // (2 * n_k * head_size * q.element_size()) * heads // key_heads
    window = 2**31 - 1 if band is None or band.window is None else min(band.window, n_k)
    problem = _Problem(
        batch, heads, key_heads, n_q, n_k, head_size, is_causal, window, max(4, in_cache), multiprocessors
    )  # fmt: skip
    starts = None if band is None or band.starts is None else band.starts.contiguous()
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    views["o"] = written
    with torch.cuda.device(q.device):
        error = _library(q.dtype, next(size for size in HEAD_SIZES if size >= head_size))(
            ctypes.byref(problem),
            *(ctypes.byref(flash_cuda.View.of(views[name])) for name in "qkvo"),
            logsumexp.data_ptr(),
            None if starts is None else starts.data_ptr(),
            counter.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
    if error is not None:
        raise RuntimeError(f"hopper_forward was not launched: {error.decode()}")
    if written.data_ptr() != o.data_ptr():
        as_4d(o).copy_(written)
    return o, logsumexp


def backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; those that are not needed have no elements."""
    is_plain = saved.band is None and group_size(saved.q, saved.k) == 1
    return (flash_cuda.backward if is_plain else compiled_backward)(dO, saved, need_dq, need_dkv)


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


def _movable(x: Tensor) -> Tensor:
    """x, or a copy if TMA cannot move it."""
    return x if can_use_tma(x) else _padded(x).copy_(x)


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
def _library(dtype: torch.dtype, head_size: int) -> flash_cuda.Launcher:
    """`hopper_forward`, compiled if necessary."""
    flags = (*FLAGS, *flash_cuda.definitions(dtype, head_size))
    name = f"cs336_flash_cuda_sm90a_{flash_cuda.ELEMENTS[dtype].strip('_')}_{head_size}"
    return function_of(flash_cuda.compiled(name, (SOURCES / "forward.cu",), flags))


def function_of(path: Path) -> flash_cuda.Launcher:
    """`hopper_forward` of a compiled library."""
    function = ctypes.CDLL(str(path)).hopper_forward
    function.argtypes, function.restype = [ctypes.c_void_p] * len(_PARAMETERS), ctypes.c_char_p
    return function
