import pytest
import torch

from tests.kernels.attention_cases import CASES, LARGE_CASES, QUICK_CASES, FlashKernelTests

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton", reason="not written yet")

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


@on_cpu_only
class TestFlashTritonInterpreted(FlashKernelTests):
    name = "flash_triton"
    function = flash_triton.FlashAttentionTriton
    dtypes = (torch.float32,)
    cases = QUICK_CASES
    random_examples = 10


@pytest.mark.gpu
class TestFlashTriton(FlashKernelTests):
    name = "flash_triton"
    function = flash_triton.FlashAttentionTriton
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = CASES + LARGE_CASES
    random_examples = 100
