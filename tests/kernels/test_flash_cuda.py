"""The tests of every kernel for flash_cuda's general kernels: strides, 64-bit offsets, the compiler; and the choice
between these and the kernels for Hopper."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_basics.attention import Documents
from cs336_systems.kernels.attention import flash_cuda as module
from cs336_systems.kernels.attention import flash_cuda_ampere, flash_cuda_build, flash_cuda_hopper
from cs336_systems.kernels.attention.contract import Band
from cs336_systems.kernels.attention.flash_cuda import FlashAttentionCuda, flash_cuda, kernels_for
from cs336_systems.kernels.attention.function import Saved
from tests.kernels import run_flash_cuda
from tests.kernels.attention_cases import CASES, LARGE_CASES, Case, FlashKernelTests, gradients

DEVICE = "cuda"
ROOT = Path(__file__).parents[2]
WITHOUT = [
    f"-D__CUDA_NO_{x}__" for x in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
]
"""PyTorch adds these to every build."""
LENGTHS = [(127, 127), (128, 128), (17, 1000), (1000, 127), (1000, 1000), (300, 555), (5, 0)]
MORE_CASES = tuple(
    Case(n_q, n_k, d, leading=(2, 3), is_causal=is_causal)
    for n_q, n_k, d in [
        *((*lengths, 64) for lengths in LENGTHS),
        *((129, 200, d) for d in (32, 59, 64, 72, 96, 128, 160, 256)),
    ]
    for is_causal in (False, True)
)


@pytest.fixture(autouse=True)
def ampere_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU, too."""
    monkeypatch.setenv("CS336_FLASH_CUDA", "ampere")


@pytest.mark.gpu
class TestFlashCuda(FlashKernelTests):
    name = "flash_cuda"
    function = FlashAttentionCuda
    device = DEVICE
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    cases = CASES + LARGE_CASES + MORE_CASES
    equal_heads = True
    random_examples = 100


def qkv(n_q: int, n_k: int, d: int, leading: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    """q, k, v and a gradient of o."""
    return [x.detach() for x in Case(n_q, n_k, d, leading).inputs(torch.bfloat16, DEVICE)]


def with_gradients(attention, q: Tensor, k: Tensor, v: Tensor, dO: Tensor, is_causal: bool) -> dict[str, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return gradients(attention(*inputs, is_causal), inputs, dO)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_bits_twice(dtype: torch.dtype, d: int) -> None:
    inputs = [x.to(dtype) for x in qkv(1000, 1000, d)]
    first, second = (with_gradients(flash_cuda, *inputs, True) for _ in range(2))
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.mark.gpu
def test_more_heads_than_a_grid_has_rows() -> None:
    q, k, v, dO = qkv(3, 3, 16, (70_000,))
    ours = with_gradients(flash_cuda, q, k, v, dO, True)
    last = with_gradients(flash_cuda, *(x[-7:].contiguous() for x in (q, k, v, dO)), True)
    for key, value in last.items():
        assert torch.equal(ours[key][-7:], value), key


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    rows, stride = 130, 2**24 + 8  # the last row starts beyond 2^31 elements
    if torch.cuda.mem_get_info()[0] < 6e9:
        pytest.skip("needs 6 GB of free GPU memory")
    q, k, v, dO = qkv(rows, rows, 64, (1, 1))
    far = torch.empty(rows * stride, dtype=q.dtype, device=DEVICE).as_strided(q.shape, (0, 0, stride, 1))
    expected = with_gradients(flash_cuda, q, k, v, dO, True)
    for i in range(3):
        inputs = [q, k, v]
        inputs[i] = far.copy_(inputs[i])
        for key, value in with_gradients(flash_cuda, *inputs, dO, True).items():
            assert torch.equal(value, expected[key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("forced", ["ampere", ""])
def test_in_a_cuda_graph(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS336_FLASH_CUDA", forced)
    q, k, v, _ = qkv(300, 300, 64)
    expected = flash_cuda(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_cuda(q, k, v, True)
    o.zero_()
    graph.replay()
    assert torch.equal(o, expected)


def under_sanitizer(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`run_flash_cuda.py` with one of compute-sanitizer's tools watching all kernels."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit, on PATH")
    # Each tensor becomes a separate allocation, with unused bytes after it.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--error-exitcode", "1", *(["--padding", "4096"] if tool == "memcheck" else [])]
    command = [sys.executable, "-m", run_flash_cuda.__name__, *arguments]
    return subprocess.run(
        ["compute-sanitizer", "--tool", tool, *options, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tool, summary", [("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "RACECHECK SUMMARY: 0 hazards displayed")]
)
def test_a_sanitizer_finds_nothing(tool: str, summary: str) -> None:
    count = run_flash_cuda.run()  # also compiles the kernels before the checker watches
    done = under_sanitizer(tool)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{count} cases ran" in done.stdout
    assert summary in done.stdout


@pytest.mark.gpu
def test_the_sanitizer_finds_a_key_beyond_the_end() -> None:
    run_flash_cuda.run(run_flash_cuda.LARGEST)  # compiles it
    done = under_sanitizer("memcheck", "beyond_the_end")
    assert done.returncode != 0
    assert "Invalid __global__ read" in done.stdout, done.stdout[-5000:]


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[int, int]:
    """The compute capability of the GPU on which all tensors seem to be."""
    monkeypatch.setattr(flash_cuda_build, "capability", lambda device: request.param)
    return request.param


def on_cpu(d: int = 8, dtype: torch.dtype = torch.bfloat16, heads: int = 1) -> Tensor:
    return torch.zeros(1, heads, 4, d, dtype=dtype)


@pytest.mark.parametrize(
    "capability, d, dtype, chosen",
    [
        ((9, 0), 1, torch.bfloat16, flash_cuda_hopper),
        ((9, 0), 128, torch.float16, flash_cuda_hopper),
        ((9, 0), 129, torch.float16, flash_cuda_ampere),
        ((9, 0), 64, torch.float32, flash_cuda_ampere),
        ((8, 0), 64, torch.bfloat16, flash_cuda_ampere),
        ((10, 0), 64, torch.bfloat16, flash_cuda_ampere),
    ],
    indirect=["capability"],
    ids=str,
)
def test_the_choice_of_kernels(
    capability: tuple[int, int], d: int, dtype: torch.dtype, chosen: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = on_cpu(d, dtype)
    for forced, kernels in module.KERNELS.items():
        monkeypatch.setenv("CS336_FLASH_CUDA", forced)
        assert kernels_for(q) is kernels
    monkeypatch.delenv("CS336_FLASH_CUDA")
    assert kernels_for(q) is chosen


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True, ids=str)
def test_deterministic_gradients_have_other_kernels(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CS336_FLASH_CUDA")
    monkeypatch.setattr(flash_cuda_hopper, "backward", lambda *_: "hopper")
    monkeypatch.setattr(flash_cuda_ampere, "backward", lambda *_: "ampere")
    monkeypatch.setattr(module, "compiled_backward", lambda *_: "compiled")
    q, pair = on_cpu(), on_cpu(heads=2)
    calls = [(q, q, None), (q, q, Band(3)), (pair, q, None)]

    def found() -> list[object]:
        return [module.backward(x, Saved(x, k, k, x, x, True, band), True, True) for x, k, band in calls]

    assert found() == ["hopper", "hopper", "hopper"]
    torch.use_deterministic_algorithms(True)
    try:
        assert found() == ["ampere", "compiled", "compiled"]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True, ids=str)
def test_the_backward_pass_refuses_what_its_kernels_do_not_serve(capability: tuple[int, int]) -> None:
    """The environment variable may change between the passes. Unchecked, fewer heads are written beyond their end."""
    q, pair, name = on_cpu(), on_cpu(heads=2), "flash_cuda without its Hopper kernels"
    for saved, message in (
        (Saved(pair, q, q, pair, pair, True), f"k has 1 heads: {name} needs as many"),
        (Saved(q, q, q, q, q, True, Band(3)), f"window is 3: {name} serves neither"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            module.backward(saved.q, saved, True, True)


def refused(message: str, q: Tensor, k: Tensor | None = None, forced: str = "", **limits: Any) -> None:
    k = q if k is None else k
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CS336_FLASH_CUDA", forced)
        with pytest.raises(ValueError, match=f"^{message}$"):
            flash_cuda(q, k, k, True, **limits)


def test_a_tensor_on_the_cpu_is_named() -> None:
    for forced in ("", "ampere", "hopper"):
        refused("q is on cpu: flash_cuda needs it on a CUDA device", on_cpu(), forced=forced)


@pytest.mark.parametrize("capability", [(9, 0)], indirect=True, ids=str)
def test_unsupported_inputs_are_named(capability: tuple[int, int]) -> None:
    sixteen = r"torch\.bfloat16, torch\.float16"
    refused(rf"q is torch\.float64: it must be one of {sixteen}, torch\.float32", on_cpu(dtype=torch.float64))
    refused(rf"q is torch\.float32: it must be one of {sixteen}", on_cpu(dtype=torch.float32), forced="hopper")
    refused("q has head size 257: it must be 1 to 256", on_cpu(257))
    refused("q has head size 136: it must be 1 to 128", on_cpu(136), forced="hopper")
    refused("CS336_FLASH_CUDA is 'fast': it must be hopper or ampere", on_cpu(), forced="fast")
    many = on_cpu()[:, :, :1].expand(1, 1, 2**31, 8)
    refused("k has 2147483648 positions: flash_cuda serves up to 2147483392", on_cpu(), many)


@pytest.mark.parametrize("capability", [(8, 0)], indirect=True, ids=str)
def test_what_only_the_hopper_kernels_serve_is_named(capability: tuple[int, int]) -> None:
    name = "flash_cuda without its Hopper kernels"
    refused(f"k has 1 heads: {name} needs as many as q has, which are 2", on_cpu(heads=2), on_cpu())
    refused(f"window is 3: {name} serves neither windows nor documents", on_cpu(), window=3)
    documents = Documents.from_numbers(torch.zeros(1, 4))
    refused(f"documents are given: {name} serves neither windows nor documents", on_cpu(), documents=documents)
    given = r"q is on cpu, of compute capability 8\.0"
    refused(rf"{given}: flash_cuda's Hopper kernels need 9\.0", on_cpu(), forced="hopper")


@pytest.mark.parametrize("capability", [(7, 5)], indirect=True, ids=str)
def test_an_older_gpu_is_named(capability: tuple[int, int]) -> None:
    refused(r"q is on cpu, of compute capability 7\.5: flash_cuda needs 8\.0 or later", on_cpu())


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    for cuda_home in (None, str(tmp_path)):
        monkeypatch.setattr(cpp_extension, "CUDA_HOME", cuda_home)
        with pytest.raises(RuntimeError, match="finds no nvcc: install the CUDA toolkit"):
            flash_cuda_ampere._library((99, 0), torch.bfloat16, 64)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="finds no ninja on PATH: pip install ninja"):
        flash_cuda_ampere._library((99, 0), torch.bfloat16, 64)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(
    "source, dtype, head_size, exact",
    [
        ("backward", torch.float16, 128, False),
        pytest.param("forward", torch.float32, 256, True, marks=pytest.mark.slow),
        pytest.param("forward", torch.bfloat16, 64, False, marks=pytest.mark.slow),
        pytest.param("backward", torch.float32, 64, True, marks=pytest.mark.slow),
        pytest.param("forward", torch.float16, 256, False, marks=pytest.mark.slow),
        pytest.param("backward", torch.bfloat16, 64, False, marks=pytest.mark.slow),
        pytest.param("backward", torch.bfloat16, 256, False, marks=pytest.mark.slow),
        pytest.param("backward", torch.float32, 256, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiles_for_sm_80_and_sm_90_without_spills(
    source: str, dtype: torch.dtype, head_size: int, exact: bool, tmp_path: Path
) -> None:
    """A spilled register is kept in memory; one in an inner loop costs more than anything a kernel could gain by it."""
    architectures = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in (80, 90)]
    options = [
        "-O3",
        "-std=c++17",
        "-Werror=all-warnings",
        "-Xptxas=-v",
        *flash_cuda_build.definitions(dtype, head_size, exact),
    ]
    files = ["-c", str(flash_cuda_build.SOURCES / f"{source}.cu"), "-o", str(tmp_path / "kernels.o")]
    built = subprocess.run(["nvcc", *options, *architectures, *WITHOUT, *files], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    spills = re.findall(r"(\d+) bytes spill stores", built.stderr)
    assert len(spills) == 2 * {"forward": 1, "backward": 3}[source]
    assert set(spills) == {"0"}
