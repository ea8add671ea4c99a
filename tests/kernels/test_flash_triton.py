import pytest
import torch

from tests.kernels.attention_cases import CASES, LARGE_CASES, QUICK_CASES, Case, FlashKernelTests, check_case

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton", reason="not written yet")

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


@on_cpu_only
class TestFlashTritonInterpreted(FlashKernelTests):
    name = "flash_triton"
    function = flash_triton.FlashAttentionTriton
    dtypes = (torch.float32,)
    cases = QUICK_CASES
    random_examples = 8


@on_cpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(65, 40, 59), Case(40, 65, 16, is_causal=True, expanded_dO=True)], ids=str)
def test_low_precision_interpreted(case: Case, dtype: torch.dtype) -> None:
    # The interpreter cuts float32 off to bfloat16 where hardware rounds: that leans all of a sum to one side.
    check_case(flash_triton.flash_triton, case, dtype, "cpu", times_plain=8 if dtype == torch.bfloat16 else 2)


@pytest.mark.gpu
class TestFlashTriton(FlashKernelTests):
    name = "flash_triton"
    function = flash_triton.FlashAttentionTriton
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = CASES + LARGE_CASES
    random_examples = 100
