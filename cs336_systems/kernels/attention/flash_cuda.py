"""FlashAttention-2 (Dao 2023) in CUDA C++, forward and backward, on the tensor cores of sm_80 and later.

The kernels are in `csrc/`, to be read in this order:

  instructions.cuh  the GPU's instructions for matrix products and copies, and which lane holds which element
  products.cuh      float32 products composed of several of these
  rows.cuh          sums over the lanes of a row
  problem.cuh       tensors and sizes, as they are passed here
  tiles.cuh         tiles in shared memory and the swizzle of their rows, products of tiles, loads and stores
  forward.cu        O and the logsumexp
  backward.cu       dQ, dK and dV, without atomic additions
  launch.cuh        the launch and its errors

They are compiled on first use into PyTorch's folder of extensions, once for each element type, precision of float32,
head size (rounded up) and architecture. This takes seconds. Python calls them through ctypes, so the sources include no
PyTorch headers, which would take longer to compile than the kernels.

`flash_cuda_hopper.py` has kernels for Hopper alone, which run instead where CS336_FLASH_CUDA is "hopper".
"""

import ctypes
import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ...machine.hardware import allows_tf32
from .contract import as_4d, check_qkv
from .function import Saved, empty_outputs, flash_function, new_gradients, new_outputs

SOURCES = Path(__file__).parent / "csrc"
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
Launcher = Callable[..., bytes | None]
_MAX_LENGTH = 2**31 - 256  # positions are 32-bit numbers, and go up to two tiles beyond the last
_HEAD_SIZES = (32, 64, 96, 128, 256)
"""The sizes that are compiled; other heads are padded with zeros to the next larger size."""
_PARAMETERS = {
    "flash_forward": ("sizes", "q", "k", "v", "o", "logsumexp", "stream"),
    "flash_backward": ("sizes", "q", "k", "v", "o", "d_o", "logsumexp", "statistics", "dq", "dk", "dv", "stream"),
}
"""The parameters of the functions in csrc, all pointers, in order."""


def flash_cuda(
    q: Float[Tensor, "... N_q D"], k: Float[Tensor, "... N_k D"], v: Float[Tensor, "... N_k D"], is_causal: bool = False
) -> Float[Tensor, "... N_q D"]:
    """softmax(q k^T / sqrt(D)) v for bfloat16, float16 and float32, D up to 256, any lengths and strides.

    Scores, softmax and accumulators are float32; probabilities are rounded to q's type before they multiply v. float32
    products follow `torch.get_float32_matmul_precision()`: at "highest" each is three TF32 products, as exact as
    float32. The result and its gradients have the same bits every time. k has as many heads as q.

    Raises ValueError for arguments it does not accept and RuntimeError if the kernels cannot be compiled.
    """
    if os.environ.get("CS336_FLASH_CUDA") == "hopper":  # not the default until a GPU has measured it
        from .flash_cuda_hopper import flash_cuda_hopper

        return flash_cuda_hopper(q, k, v, is_causal)
    return FlashAttentionCuda.call(q, k, v, is_causal)


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """o and the logsumexp of the scaled scores, in nats."""
    _check(q, k, v, is_causal)
    if (outputs := empty_outputs(q, k)) is not None:
        return outputs
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


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    check_qkv(q, k, v, is_causal)
    if q.device.type != "cuda":
        raise ValueError(f"q is on {q.device}: flash_cuda needs it on a CUDA device")
    capability = _capability(q.device)
    if capability < (8, 0):
        raise ValueError(
            f"q is on {q.device}, of compute capability {capability[0]}.{capability[1]}: flash_cuda needs 8.0 or later"
        )
    _check_supported(q, k, v, is_causal)


def _check_supported(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    dtypes, max_head_size = tuple(ELEMENTS), _HEAD_SIZES[-1]
    check_qkv(q, k, v, is_causal, dtypes=dtypes, max_head_size=max_head_size, equal_heads="flash_cuda")
    check_lengths(q, k)


def check_lengths(q: Tensor, k: Tensor) -> None:
    """Raise a ValueError for more positions than the kernels count."""
    for name, x in (("q", q), ("k", k)):
        if x.shape[-2] > _MAX_LENGTH:
            raise ValueError(f"{name} has {x.shape[-2]} positions: flash_cuda serves up to {_MAX_LENGTH}")


FlashAttentionCuda = flash_function("flash_cuda", forward, backward, _check_supported)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class View(ctypes.Structure):
    """`View` of csrc/problem.cuh; `vectorised` is set there."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "row", "column", "vectorised")),
    )

    tensor: Tensor

    @classmethod
    def of(cls, x: Tensor) -> "View":
        x = as_4d(x)
        view = cls(x.data_ptr(), *x.stride())
        view.tensor = x  # if as_4d had to copy, only this holds the copy
        return view


class _Sizes(ctypes.Structure):
    """`Sizes` of csrc/problem.cuh."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("batch", "heads", "n_q", "n_k", "head_size", "is_causal"))


def _call(name: str, is_causal: bool, **tensors: Tensor) -> None:
    """Call a function of csrc on the current stream of q's device. A tensor without elements becomes a null pointer."""
    q, k = tensors["q"], tensors["k"]
    batch, heads, n_q, head_size = as_4d(q).shape
    sizes = _Sizes(batch, heads, n_q, k.shape[-2], head_size, is_causal)
    built_for = next(size for size in _HEAD_SIZES if size >= head_size)
    exact = q.dtype == torch.float32 and not allows_tf32()
    function = _library(_capability(q.device), q.dtype, built_for, exact)[name]
    arguments: dict[str, Any] = {"sizes": ctypes.byref(sizes)}
    for each, x in tensors.items():
        if each in ("logsumexp", "statistics"):
            arguments[each] = x.data_ptr()
        else:
            arguments[each] = ctypes.byref(View.of(x)) if x.numel() else None
    with torch.cuda.device(q.device):
        arguments["stream"] = torch.cuda.current_stream().cuda_stream
        error = function(*(arguments[parameter] for parameter in _PARAMETERS[name]))
    if error is not None:
        raise RuntimeError(f"{name} was not launched: {error.decode()}")


@functools.cache
def _library(
    capability: tuple[int, int], dtype: torch.dtype, head_size: int, exact: bool = False
) -> Mapping[str, Launcher]:
    """The functions of the library for one architecture and `definitions`, compiled if necessary."""
    architecture = "".join(map(str, capability))
    name = f"cs336_flash_cuda_sm{architecture}_{ELEMENTS[dtype].strip('_')}_{head_size}{'_exact' if exact else ''}"
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    sources = (SOURCES / "forward.cu", SOURCES / "backward.cu")
    return _functions(compiled(name, sources, (target, *definitions(dtype, head_size, exact))))


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """A library in PyTorch's folder of extensions, compiled if its sources are new."""
    from torch.utils import cpp_extension  # slow to import, and looks for the compiler

    if cpp_extension.CUDA_HOME is None or not (Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc").exists():
        raise RuntimeError(
            "flash_cuda compiles its kernels on first use and finds no nvcc: install the CUDA toolkit, "
            "of PyTorch's CUDA version, and set CUDA_HOME to its folder"
        )
    if shutil.which("ninja") is None:
        raise RuntimeError("flash_cuda compiles its kernels on first use and finds no ninja on PATH: pip install ninja")
    path = cpp_extension.load(name, list(map(str, sources)), extra_cuda_cflags=["-O3", *flags], is_python_module=False)
    return Path(path)


def _functions(path: Path) -> Mapping[str, Launcher]:
    """The functions of a compiled library."""
    library = ctypes.CDLL(str(path))
    for name, parameters in _PARAMETERS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * len(parameters), ctypes.c_char_p
    return {name: getattr(library, name) for name in _PARAMETERS}


def definitions(dtype: torch.dtype, head_size: int, exact: bool = False) -> list[str]:
    """Compiler definitions for one element type and head size. exact: do not multiply float32 as TF32."""
    return [f"-DELEMENT={ELEMENTS[dtype]}", f"-DHEAD_SIZE={head_size}", f"-DEXACT={str(exact).lower()}"]
