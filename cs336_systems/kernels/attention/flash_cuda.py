"""FlashAttention in CUDA C++, forward and backward, for Hopper and for all GPUs from compute capability 8.0 on.

`kernels_for` chooses between two sets of kernels. Each module lists its sources, in the order in which to read them:

  flash_cuda_ampere.py  FlashAttention-2 with the instructions of compute capability 8.0, for all types and head sizes
  flash_cuda_hopper.py  for Hopper, with its TMA and its matrix products in the background
  flash_cuda_build.py   the compiler, and how tensors are passed to the kernels
"""

import os
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_basics.attention import Documents

from . import flash_cuda_ampere, flash_cuda_build, flash_cuda_hopper
from .contract import Band, band_of, check_qkv, group_size
from .flash_torch import compiled_backward
from .function import Saved, empty_outputs, flash_function

KERNELS = {"hopper": flash_cuda_hopper, "ampere": flash_cuda_ampere}
_MAX_LENGTH = 2**31 - 256  # positions are 32-bit numbers, and tiles reach beyond the last one


def flash_cuda(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... N_q D"]:
    """softmax(q k^T / sqrt(D)) v for bfloat16, float16 and float32, D up to 256, any lengths and strides.

    Scores, softmax and accumulators are float32; probabilities are rounded to q's type before they multiply v. float32
    products follow `torch.get_float32_matmul_precision()`: at "highest" each is three TF32 products, as exact as
    float32.

    On Hopper, 16-bit numbers with D up to 128 have kernels of their own. Only these serve windows, documents and fewer
    heads in k and v than in q. They copy tensors that TMA cannot move. They add to dQ in any order, so its last bits
    differ from run to run. With `torch.use_deterministic_algorithms(True)` other kernels compute the gradients. The
    environment variable CS336_FLASH_CUDA, "hopper" or "ampere", forces one of the two sets of kernels.

    Raises ValueError for arguments it does not accept and RuntimeError if the kernels cannot be compiled.
    """
    return FlashAttentionCuda.call(q, k, v, is_causal, band_of(window, documents))


def kernels_for(q: Tensor) -> ModuleType:
    """The module whose kernels compute a call with these queries."""
    if forced := os.environ.get("CS336_FLASH_CUDA"):
        if forced not in KERNELS:
            raise ValueError(f"CS336_FLASH_CUDA is {forced!r}: it must be {' or '.join(KERNELS)}")
        return KERNELS[forced]
    serves = q.dtype in flash_cuda_hopper.DTYPES and q.shape[-1] <= flash_cuda_hopper.HEAD_SIZES[-1]
    is_hopper = flash_cuda_build.capability(q.device) == flash_cuda_hopper.CAPABILITY
    return flash_cuda_hopper if serves and is_hopper else flash_cuda_ampere


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """o and the logsumexp of the scaled scores, in nats."""
    check_qkv(q, k, v, is_causal)
    _check_lengths(q, k)
    kernels = kernels_for(q)
    kernels.check(q, k, v, is_causal, band)
    return empty_outputs(q, k) or kernels.forward(q, k, v, is_causal, band)


def backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; those that are not needed have no elements."""
    q, k, v, _, _, is_causal, band = saved
    kernels = kernels_for(q)
    kernels.check(q, k, v, is_causal, band)  # CS336_FLASH_CUDA may have changed since the forward pass
    compute = kernels.backward
    if kernels is flash_cuda_hopper and torch.are_deterministic_algorithms_enabled():
        is_plain = band is None and group_size(q, k) == 1
        compute = flash_cuda_ampere.backward if is_plain else compiled_backward
    return compute(dO, saved, need_dq, need_dkv)


def _check_supported(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    """The checks that need no GPU."""
    dtypes, max_head_size = flash_cuda_ampere.DTYPES, flash_cuda_ampere.HEAD_SIZES[-1]
    check_qkv(q, k, v, is_causal, dtypes=dtypes, max_head_size=max_head_size)
    _check_lengths(q, k)


def _check_lengths(q: Tensor, k: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x.shape[-2] > _MAX_LENGTH:
            raise ValueError(f"{name} has {x.shape[-2]} positions: flash_cuda serves up to {_MAX_LENGTH}")


FlashAttentionCuda = flash_function("flash_cuda", forward, backward, _check_supported)
