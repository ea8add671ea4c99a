import functools
import inspect

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
    random_examples = 5


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


HAS_COMPILED_BACKWARD = "backward" in inspect.signature(flash_triton.flash_triton).parameters


@pytest.mark.skipif(not HAS_COMPILED_BACKWARD, reason="flash_triton has no choice of its backward pass")
class TestCompiledBackward:
    """Triton's forward pass with the handout's backward pass in PyTorch."""

    CASES = (Case(65, 65), Case(65, 40, 59, leading=(2, 2), is_causal=True), Case(0, 16), Case(16, 0))

    def check(self, case: Case, dtype: torch.dtype, device: str) -> None:
        check_case(functools.partial(flash_triton.flash_triton, backward="compiled"), case, dtype, device)

    @on_cpu_only
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_the_truth_interpreted(self, case: Case) -> None:
        self.check(case, torch.float32, "cpu")

    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", (*CASES, Case(1000, 1000, 64, is_causal=True)), ids=str)
    def test_equals_the_truth(self, case: Case, dtype: torch.dtype) -> None:
        self.check(case, dtype, "cuda")

    def test_another_backward_pass_is_refused(self) -> None:
        q = torch.ones(1, 16, 16, device="cuda" if torch.cuda.is_available() else "cpu")
        with pytest.raises(ValueError, match=r"^backward is 'numpy'"):
            flash_triton.flash_triton(q, q, q, backward="numpy")
