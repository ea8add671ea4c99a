"""The building blocks of csrc/hopper by themselves: in the emulator, and on a Hopper GPU."""

import ctypes
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.kernels.attention import flash_cuda_build, flash_cuda_hopper
from tests.kernels.emulated_flash_cuda import Change, compiled, copy_sources, run
from tests.kernels.emulated_flash_cuda_hopper import machine

SOURCE = Path(__file__).parent / "hopper_blocks.cu"
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on PATH")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """cpu: the emulator."""
    if request.param == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return str(request.param)


@functools.cache
def library(device: str, dtype: torch.dtype, head_size: int, *changes: Change) -> ctypes.CDLL:
    definitions = flash_cuda_build.definitions(dtype, head_size)
    if device == "cuda":
        name = f"cs336_hopper_blocks_{str(dtype)[6:]}_{head_size}"
        flags = (*flash_cuda_hopper.FLAGS, *definitions, f"-I{flash_cuda_build.SOURCES}")
        return ctypes.CDLL(str(flash_cuda_build.compiled(name, (SOURCE,), flags)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(SOURCE, folder)
        copy_sources(folder, changes)
        objects = [compiled(folder, SOURCE.name, definitions), *machine(folder)]
        run(["g++", "-shared", *objects, "-o", folder / "library.so"], folder)
        return ctypes.CDLL(str(folder / "library.so"))


def call(device: str, function: Any, *arguments: Tensor | list[int] | None) -> str | None:
    """Call a function of hopper_blocks.cu: views of 4-D tensors, pointers to others, lists of numbers, the stream."""
    function.restype = ctypes.c_char_p
    passed: list[Any] = []
    for x in arguments:
        if isinstance(x, list):
            passed.append((ctypes.c_int64 * len(x))(*x))
        elif x is not None:
            passed.append(ctypes.byref(flash_cuda_build.View.of(x)) if x.ndim == 4 else ctypes.c_void_p(x.data_ptr()))
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0
    error = function(*passed, ctypes.c_void_p(stream))
    return None if error is None else str(error.decode())


@pytest.mark.parametrize("head_size, columns", [(64, 64), (64, 40), (128, 128), (128, 72)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_a_box(device: str, dtype: torch.dtype, head_size: int, columns: int) -> None:
    """Rows and columns beyond the tensor are not stored; heads are inside of the rows."""
    x = torch.randn(2, 100, 3, columns, device=device).to(dtype).transpose(1, 2)
    y = torch.zeros(2, 3, 100, columns, device=device, dtype=dtype)
    assert call(device, library(device, dtype, head_size).copy, x, y, list(x.shape), [1, 2, 64]) is None
    expected = torch.zeros_like(y)
    expected[1, 2, 64:] = 1 + x[1, 2, 64:]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_in_registers(device: str, dtype: torch.dtype, head_size: int) -> None:
    x = torch.randn(1, 1, 64, head_size, device=device).to(dtype)
    y = torch.zeros_like(x)
    assert call(device, library(device, dtype, head_size).operands, x, y) is None
    assert torch.equal(y, x)


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(device: str, dtype: torch.dtype, head_size: int, from_registers: bool) -> None:
    """Small whole numbers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(0)
    x, y, z = (
        torch.randint(-2, 3, (1, 1, rows, head_size), generator=generator).to(device, dtype) for rows in (64, 128, 128)
    )
    y[..., :, 4:] = 0  # scores up to 16: exact in bfloat16
    scores = torch.empty(64, 128, device=device)
    output = torch.empty(64, head_size, device=device)
    assert call(device, library(device, dtype, head_size).products, x, y, z, scores, output, [from_registers]) is None
    expected = x[0, 0].float() @ y[0, 0].float().T
    assert torch.equal(scores, expected)
    assert torch.equal(output, expected @ z[0, 0].float())


@pytest.mark.parametrize("head_size, column", [(64, 0), (128, 0), (128, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_transposed_tiles(device: str, dtype: torch.dtype, head_size: int, column: int) -> None:
    """Both operands lie down the rows."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-2, 3, (1, 1, 128, n), generator=generator).to(device, dtype) for n in (64, head_size))
    output = torch.empty(64, 64, device=device)
    assert call(device, library(device, dtype, head_size).transposed, x, y, [column], output) is None
    assert torch.equal(output, x[0, 0].float().T @ y[0, 0, :, column : column + 64].float())


def test_sums_in_global_memory(device: str) -> None:
    numbers = torch.arange(5 * 256, device=device, dtype=torch.float32).view(5, 256)
    total = torch.ones(256, device=device)
    assert call(device, library(device, torch.bfloat16, 64).sums, total, numbers.view(-1), [5]) is None
    assert torch.equal(total, 1 + 4 * numbers.sum(0))


def test_warpgroups_take_turns(device: str) -> None:
    numbers = torch.zeros(13, device=device, dtype=torch.int32)
    assert call(device, library(device, torch.bfloat16, 64).turns, numbers) is None
    assert numbers.tolist() == [12, *([0, 1, 2] * 4)]


FAULTS: dict[str, tuple[Change, str]] = {
    "a product of tiles before their barrier": (
        ("hopper_blocks.cu", "barrier.wait(0);\n\n", ""),
        "shared memory read before the barrier of its load",
    ),
    "a sum overwritten before it is read": (
        ("hopper_blocks.cu", "wait_until_stores_have_read();", ""),
        "shared memory written before a store has read it",
    ),
    "a sum of what is written without a fence": (
        ("hopper_blocks.cu", "fence_async();\n        __syncthreads();", "__syncthreads();"),
        "shared memory used without fence_async",
    ),
    "a sum of what is written without a barrier": (
        ("hopper_blocks.cu", "fence_async();\n        __syncthreads();", "fence_async();"),
        "shared memory read without a barrier",
    ),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on PATH")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault: str) -> None:
    change, found = FAULTS[fault]
    blocks = library("cpu", torch.bfloat16, 64, change)
    if "product" in fault:
        tiles = (torch.zeros(1, 1, rows, 64, dtype=torch.bfloat16) for rows in (64, 128, 128))
        error = call("cpu", blocks.products, *tiles, torch.empty(64, 128), torch.empty(64, 64), [0])
    else:
        error = call("cpu", blocks.sums, torch.zeros(256), torch.zeros(256), [1])
    assert str(error).startswith(found)
