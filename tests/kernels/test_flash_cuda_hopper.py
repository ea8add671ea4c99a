"""The tests of every kernel for flash_cuda's Hopper kernels, on such a GPU; and their machine code, without one."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cs336_systems.kernels.attention import flash_cuda_build
from cs336_systems.kernels.attention import flash_cuda_hopper as module
from cs336_systems.kernels.attention.flash_cuda import FlashAttentionCuda, flash_cuda
from tests.kernels import run_flash_cuda
from tests.kernels.attention_cases import CASES, LARGE_CASES, Case, FlashKernelTests, gradients
from tests.kernels.machine_code import unset_registers
from tests.kernels.test_flash_cuda import WITHOUT, under_sanitizer

DEVICE = "cuda"
LENGTHS = ((127, 127), (128, 128), (192, 192), (193, 385), (17, 1000), (1000, 127), (1000, 1000), (300, 555), (5, 0))
MORE_CASES = tuple(
    Case(n_q, n_k, d, leading=(2, 3), is_causal=is_causal)
    for n_q, n_k in LENGTHS
    for d in (64, 100, 128)
    for is_causal in (False, True)
) + tuple(
    Case(300, 1000, d, leading=(2, 3), largest_score=40)  # maxima that grow by less and by more than SLACK
    for d in (64, 128)
)


@pytest.fixture(autouse=True)
def hopper_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS336_FLASH_CUDA", "hopper")


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.mark.gpu
@on_hopper
class TestFlashCudaHopper(FlashKernelTests):
    name = "flash_cuda"
    function = FlashAttentionCuda
    device = DEVICE
    dtypes = (torch.bfloat16, torch.float16)
    cases = CASES + LARGE_CASES + MORE_CASES
    max_head_size = 128
    bands = True
    random_examples = 100


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_same_bits_twice(d: int) -> None:
    q, k, v, _ = (x.detach() for x in Case(1000, 1000, d, (2, 3)).inputs(torch.bfloat16, DEVICE))
    assert torch.equal(flash_cuda(q, k, v, True), flash_cuda(q, k, v, True))


@pytest.mark.gpu
@on_hopper
def test_can_be_the_first_use_of_the_gpu_in_a_thread() -> None:
    q, k, v, _ = (x.detach() for x in Case(1000, 1000, 64, (2, 3)).inputs(torch.bfloat16, DEVICE))
    expected = flash_cuda(q, k, v, True)
    with ThreadPoolExecutor() as threads:
        assert torch.equal(threads.submit(flash_cuda, q, k, v, True).result(), expected)


@pytest.mark.gpu
@on_hopper
def test_they_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = (x.detach() for x in Case(1000, 1000, 64, (2, 3)).inputs(torch.bfloat16, DEVICE))
    expected = flash_cuda(q, k, v, True)
    monkeypatch.delenv("CS336_FLASH_CUDA")
    assert torch.equal(flash_cuda(q, k, v, True), expected)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("d", [64, 128])
def test_same_gradients_twice_where_asked(d: int) -> None:
    case = Case(2000, 2000, d, (2, 3))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            gradients(flash_cuda(q, k, v, True), [q, k, v], dO)
            for q, k, v, dO in (case.inputs(torch.bfloat16, DEVICE) for _ in range(2))
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_a_sanitizer_finds_nothing(tool: str) -> None:
    count = run_flash_cuda.run()  # also compiles the kernels
    done = under_sanitizer(tool)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert f"{count} cases ran" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@on_hopper
def test_racecheck_finds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It follows neither copies of tiles nor operands of products. The emulator does."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # compiles kernels that nothing else uses
    done = under_sanitizer("racecheck", "for_racecheck")
    assert "RACECHECK SUMMARY: 0 hazards displayed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.returncode == 0


def compiled(source: str, tmp_path: Path, dtype: torch.dtype, head_size: int) -> tuple[str, str]:
    """The machine code of a source, and what the compiler says."""
    made = tmp_path / "kernels.cubin"
    options = ["-O3", "-std=c++17", "-Werror=all-warnings", "-Xptxas=-v", *WITHOUT, *module.FLAGS]
    command = ["nvcc", *options, *flash_cuda_build.definitions(dtype, head_size), "-cubin", "-o", str(made)]
    built = subprocess.run([*command, str(module.SOURCES / f"{source}.cu")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    triton = pytest.importorskip("triton")
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    listing = subprocess.run([disassembler, "-c", made], capture_output=True, text=True, check=True).stdout
    return listing, built.stdout + built.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(
    "source, dtype, head_size",
    [
        ("forward", torch.float16, 128),
        ("backward", torch.bfloat16, 128),
        pytest.param("forward", torch.bfloat16, 64, marks=pytest.mark.slow),  # test_hopper_guide.py compiles it
        pytest.param("forward", torch.bfloat16, 128, marks=pytest.mark.slow),
        pytest.param("forward", torch.float16, 64, marks=pytest.mark.slow),
        pytest.param("backward", torch.float16, 64, marks=pytest.mark.slow),
        pytest.param("backward", torch.float16, 128, marks=pytest.mark.slow),
        pytest.param("backward", torch.bfloat16, 64, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiles_without_spills_and_waits(source: str, dtype: torch.dtype, head_size: int, tmp_path: Path) -> None:
    """ptxas reports products that it makes wait for each other (C7512, C7514, C7515) and registers it keeps in memory.

    In the loops of the backward pass, exponentials have to be between the wait for the scores and that for the next
    product. In those of the forward pass, the products of other warpgroups run beside them.
    """
    listing, messages = compiled(source, tmp_path, dtype, head_size)
    assert "(C7" not in messages, messages
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", messages)
    assert spills == [("0", "0", "0")] * {"forward": 1, "backward": 3}[source]
    assert not unset_registers(listing)
    landmarks = re.findall(r"HGMMA|MUFU\.EX2|DEPBAR\.LE gsb0, 0x\d", listing)
    # Products of 16 of the numbers that they add over, exponentials, waits for all products but the last 0, 1, 2.
    loops = "".join({"H": ".", "M": "x"}.get(each[0], each[-1]) for each in landmarks)
    expected, count = {
        # S and O += P v; 64 probabilities and two factors for the rows' sums. Once without and once with a mask.
        ("forward", 64): (r"\.{12}10x{66}", 2),
        ("forward", 128): (r"\.{16}10x{66}", 2),
        # S, dP; dV, dK, S, dP, dQ; dV, dK.
        ("backward", 64): (r"\.{8}1x{32}0\.{24}2x{32}1\.{8}10", 1),
        # S, dP; dV; dQ, dK.
        ("backward", 128): (r"\.{16}1x{32}\.{4}1\.{12}10", 1),
    }[source, head_size]
    assert len(re.findall(expected, loops)) == count, loops
