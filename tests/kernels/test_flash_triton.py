from typing import Any

import pytest
import torch

from cs336_systems.kernels.attention import flash_torch, get_attention
from tests.kernels.attention_cases import CASES, LARGE_CASES, QUICK_CASES, Case, FlashKernelTests, check_case

pytest.importorskip("triton", reason="Triton is only there on Linux")
flash_triton = pytest.importorskip("cs336_systems.kernels.attention.flash_triton")

on_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is a GPU")


@on_cpu_only
class TestFlashTritonInterpreted(FlashKernelTests):
    name = "flash_triton"
    function = flash_triton.FlashAttentionTriton
    dtypes = (torch.float32,)
    cases = QUICK_CASES
    random_examples = 3


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


# What is launched depends on the size: (TMA_FROM_SCORES, ONE_LAUNCH_BELOW_SCORES) for each way at every size.
NEVER, ALWAYS = 2**62, 0
WAYS = {"one launch": (NEVER, NEVER), "pointers": (NEVER, ALWAYS), "descriptors": (ALWAYS, ALWAYS)}


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tma_from, one_launch_below = WAYS[request.param]
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", tma_from)
    monkeypatch.setattr(flash_triton, "ONE_LAUNCH_BELOW_SCORES", one_launch_below)
    monkeypatch.setattr(flash_triton, "_LAUNCHES", {})


@on_cpu_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["pointers", "descriptors"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        Case(65, 130, 16, leading=(2, 3), is_causal=True),
        Case(130, 65, 40),
        Case(129, 129, 64, leading=(2, 2), layout="heads_inside", is_causal=True, expanded_dO=True),
        Case(33, 40, 59, is_causal=True, needs="q"),
        Case(40, 33, 16, is_causal=True, needs="kv"),
    ],
    ids=str,
)
def test_every_way_equals_the_truth_interpreted(case: Case) -> None:
    check_case(flash_triton.flash_triton, case, torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way, dtype", [("pointers", torch.float16), ("descriptors", torch.bfloat16)], indirect=["way"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_equals_the_truth(case: Case, dtype: torch.dtype) -> None:
    check_case(flash_triton.flash_triton, case, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_the_sizes_of_training_equal_the_truth(d: int) -> None:
    """Long enough for descriptors by itself."""
    case = Case(4096, 4096, d, leading=(2, 8), is_causal=True, layout="heads_inside")
    assert flash_triton.TMA_FROM_SCORES <= 16 * 4096 * 4096
    check_case(flash_triton.flash_triton, case, torch.bfloat16, "cuda")


# Triton's forward pass with the handout's backward pass in PyTorch.
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
    function = flash_triton.FlashAttentionTritonCompiled
    cases = COMPILED_CASES
    random_examples = 2


@pytest.mark.gpu
class TestFlashTritonCompiled(FlashKernelTests):
    name = "flash_triton_compiled"
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

    monkeypatch.setattr(flash_torch, "_compiled_gradients", lambda: gradients)
    check_case(
        get_attention("flash_triton_compiled"), Case(300, 260, 16, leading=(), is_causal=True), torch.float32, "cpu"
    )
    assert ran == [(1, 260, 16)]  # one call over all scores
