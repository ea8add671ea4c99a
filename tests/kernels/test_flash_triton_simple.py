import pytest
import torch

from tests.kernels.attention_cases import CASES, LARGE_CASES, QUICK_CASES, FlashKernelTests

pytest.importorskip("triton", reason="Triton is only there on Linux")
simple = pytest.importorskip("cs336_systems.kernels.attention.flash_triton_simple")

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


@on_cpu_only
class TestFlashTritonSimpleInterpreted(FlashKernelTests):
    name = "flash_triton_simple"
    function = simple.FlashAttentionTritonSimple
    cases = QUICK_CASES
    max_head_size = 128
    equal_heads = True
    random_examples = 3
    random_length = 90


@pytest.mark.gpu
class TestFlashTritonSimple(FlashKernelTests):
    name = "flash_triton_simple"
    function = simple.FlashAttentionTritonSimple
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = CASES + LARGE_CASES
    max_head_size = 128
    equal_heads = True
    random_examples = 30


def test_refuses_larger_heads_and_other_dtypes() -> None:
    q = torch.zeros(4, 129)
    with pytest.raises(ValueError, match=r"^q has head size 129: .* 1 to 128$"):
        simple.flash_triton_simple(q, q, q)
    with pytest.raises(ValueError, match=r"^q is torch\.float64: "):
        simple.flash_triton_simple(*(torch.zeros(4, 16, dtype=torch.float64) for _ in range(3)))


def test_names_itself_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs336_systems.kernels.launch.INTERPRET", False)
    q = torch.zeros(4, 16)
    with pytest.raises(ValueError, match=r"^q is on cpu: flash_triton_simple needs a CUDA device.*TRITON_INTERPRET=1"):
        simple.flash_triton_simple(q, q, q)


def test_refuses_grouped_heads_by_name() -> None:
    q = torch.zeros(8, 4, 16)
    with pytest.raises(ValueError, match=r"^k has 2 heads: flash_triton_simple needs as many as q has, which are 8$"):
        simple.flash_triton_simple(q, q[:2], q[:2])
