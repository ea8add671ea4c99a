"""flash_cuda without a GPU: its sources under an emulator that watches shared memory."""

import shutil

import pytest
import torch

from cs336_systems.kernels.attention.flash_cuda import FlashAttentionCuda, flash_cuda
from tests.kernels.attention_cases import CASES, Case, check_case
from tests.kernels.emulated_flash_cuda import Change, emulated

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on PATH")

CORNERS = (
    Case(65, 140, 64, leading=(), is_causal=True),
    Case(140, 17, 64, leading=(), layout="off_by_one"),
    Case(129, 129, 59, leading=(), is_causal=True, layout="columns_apart"),
    Case(17, 40, 64, leading=(2, 2), layout="heads_inside"),
    Case(65, 65, 64, leading=(), largest_score=1e4),
)
ALL_CASES = [case for case in CASES if not (case.key_heads or case.window or case.documents)]


def check(case: Case, dtype: torch.dtype) -> None:
    with emulated():
        check_case(FlashAttentionCuda.apply, case, dtype, "cpu")


@pytest.mark.parametrize("case", CORNERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_corners(dtype: torch.dtype, case: Case) -> None:
    check(case, dtype)


@pytest.mark.parametrize(
    "dtype, d",
    [
        (torch.float16, 128),
        (torch.bfloat16, 256),
        (torch.float32, 96),
        pytest.param(torch.float32, 200, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_head_sizes(dtype: torch.dtype, d: int) -> None:
    check(Case(70, 80, d, leading=(1,), is_causal=True), dtype)
    check(Case(80, 70, d, leading=(1,), layout="rows_apart"), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_cases(dtype: torch.dtype, case: Case) -> None:
    check(case, dtype)


def test_tf32_is_less_exact() -> None:
    q, k, v, _ = Case(33, 33, 64, leading=(1,)).inputs(torch.float32, "cpu")
    with emulated():
        exact = flash_cuda(q, k, v)
        torch.set_float32_matmul_precision("high")
        try:
            rounded = flash_cuda(q, k, v)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert 2e-5 < float((exact - rounded).detach().norm() / exact.detach().norm()) < 2e-3


@pytest.mark.parametrize(
    "change, found",
    [
        (("forward.cu", "__syncthreads();", ""), "shared memory read before it is written"),
        (("forward.cu", "wait_for_copies();", ""), "shared memory read while it is copied to"),
        (("forward.cu", "bytes(TILE + 4 * Shape::STEP)", "bytes(TILE + 3 * Shape::STEP)"), "an address beyond shared"),
        (("tiles.cuh", "(chunk ^ turn) * 16", "chunk * 16"), "rows of a matrix in the same banks"),
    ],
    ids=["barrier", "wait", "memory", "swizzle"],
)
def test_the_emulator_finds_faults(change: Change, found: str) -> None:
    q, k, v, _ = Case(65, 200, 64, leading=(1,)).inputs(torch.bfloat16, "cpu")
    with emulated(change), pytest.raises(RuntimeError, match=f"^flash_forward was not launched: {found}"):
        flash_cuda(q, k, v)
