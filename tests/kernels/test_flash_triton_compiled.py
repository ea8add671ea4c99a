"""Triton's forward pass with the handout's backward pass in PyTorch."""

from typing import Any

import pytest
import torch

from cs336_systems.kernels.attention import flash_torch, get_attention
from tests.kernels.attention_cases import Case, FlashKernelTests, check_case

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton")

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")

COMPILED_CASES = (
    Case(65, 65),
    Case(65, 40, 59, leading=(2, 2), is_causal=True),
    Case(40, 65, 16, leading=(1, 2), is_causal=True, layout="heads_inside", expanded_dO=True),
    Case(33, 33, is_causal=True, needs="q"),
    Case(33, 33, is_causal=True, needs="kv"),
    Case(0, 16),
    Case(16, 0),
)


@on_cpu_only
class TestFlashTritonCompiledInterpreted(FlashKernelTests):
    name = "flash_triton_compiled"
    bands = True
    function = flash_triton.FlashAttentionTritonCompiled
    cases = COMPILED_CASES
    random_examples = 2
    random_length = 90


@pytest.mark.gpu
class TestFlashTritonCompiled(FlashKernelTests):
    name = "flash_triton_compiled"
    bands = True
    function = flash_triton.FlashAttentionTritonCompiled
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = (*COMPILED_CASES, Case(1000, 1000, 64, is_causal=True))
    random_examples = 10

    def test_memory_does_not_grow_with_the_square_of_the_length(self) -> None:
        pytest.skip("the backward pass holds all scores")


@on_cpu_only
def test_the_compiled_backward_pass_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not Triton's, and with a compiler at hand in compiled code."""
    ran: list[tuple[int, ...]] = []

    def gradients(*arguments: Any) -> Any:
        ran.append(tuple(arguments[0].shape))
        return flash_torch._gradients(*arguments)

    monkeypatch.setattr(flash_torch, "_WORTH_COMPILING", {"cpu": 1})
    monkeypatch.setattr(flash_torch, "_compiled_gradients", lambda: gradients)
    case = Case(300, 260, 16, leading=(), is_causal=True)
    check_case(get_attention("flash_triton_compiled"), case, torch.float32, "cpu")
    assert ran == [(1, 260, 16)]  # one call over all scores
