"""Compiles the CUDA C++ kernels of `csrc`, and hands tensors to them.

Kernels are compiled on first use into PyTorch's folder of extensions. Python calls them through ctypes, so the sources
include no PyTorch headers, which would take longer to compile than the kernels.
"""

import ctypes
import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .contract import as_4d

SOURCES = Path(__file__).parent / "csrc"
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
Launcher = Callable[..., bytes | None]


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of q's device. Raises ValueError if that is not a CUDA device."""
    if device.type != "cuda":
        raise ValueError(f"q is on {device}: flash_cuda needs it on a CUDA device")
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


def compiled(name: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """A library in PyTorch's folder of extensions, compiled if its sources have changed.

    Raises RuntimeError if nvcc or ninja is missing.
    """
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


def functions_of(path: Path, parameters: Mapping[str, int]) -> Mapping[str, Launcher]:
    """The functions of a compiled library by name. `parameters` counts the parameters of each, all pointers."""
    library = ctypes.CDLL(str(path))
    for name, count in parameters.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * count, ctypes.c_char_p
    return {name: getattr(library, name) for name in parameters}


def definitions(dtype: torch.dtype, head_size: int, exact: bool = False) -> list[str]:
    """Compiler definitions for one element type and head size. exact: do not multiply float32 as TF32."""
    return [f"-DELEMENT={ELEMENTS[dtype]}", f"-DHEAD_SIZE={head_size}", f"-DEXACT={str(exact).lower()}"]
