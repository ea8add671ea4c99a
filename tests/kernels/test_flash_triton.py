import dataclasses
import math
from types import SimpleNamespace
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


# The forward pass in Gluon is for head sizes that are padded to 128. All cases that descriptors can move come to it.
MOVABLE = ("contiguous", "heads_inside", "leading_swapped", "rows_apart")
GLUON_CASES = [
    case if 64 < case.d <= 128 else dataclasses.replace(case, d=128)
    for case in (*CASES, *LARGE_CASES)
    if case.layout in MOVABLE and case.n_q * case.n_k * math.prod(case.leading) and case.d in (32, 80, 96, 128)
]
on_hopper_only = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="it is written for Hopper"
)


@pytest.mark.gpu
@on_hopper_only
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("way", ["descriptors"], indirect=True)
class TestForwardInGluon:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("case", GLUON_CASES, ids=str)
    def test_equals_the_truth(self, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Any] = []
        make = flash_triton.gluon_forward_launch
        monkeypatch.setattr(flash_triton, "gluon_forward_launch", lambda *x: made.append(make(*x)) or made[-1])
        check_case(flash_triton.flash_triton, case, dtype, "cuda")
        assert made

    def test_scores_of_minus_infinity_weigh_nothing(self) -> None:
        """Also where they are all that the last tile has, which comes first."""
        q, k, v = (torch.randn(2, 3, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        q, k = q.abs(), k.abs()
        k[..., 200:, :] = -math.inf
        expected = flash_triton.flash_triton(q, k[..., :200, :], v[..., :200, :])
        torch.testing.assert_close(flash_triton.flash_triton(q, k, v), expected, rtol=2e-2, atol=2e-2)

    def test_gives_the_same_bits_every_time(self) -> None:
        q, k, v = (torch.randn(1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        first, *others = (flash_triton.flash_forward(q, k, v, True) for _ in range(4))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.mark.parametrize(
    "capability, case, dtype, expected",
    [
        (HOPPER, Case(d=128), torch.bfloat16, "gluon"),
        (HOPPER, Case(d=80, layout="heads_inside"), torch.float16, "gluon"),
        (HOPPER, Case(d=64), torch.bfloat16, "triton"),
        (HOPPER, Case(d=256), torch.bfloat16, "triton"),
        (HOPPER, Case(d=100), torch.bfloat16, "triton"),  # rows of 200 bytes, which the copy engine cannot move
        (HOPPER, Case(d=128), torch.float32, "triton"),
        (HOPPER, Case(d=128, layout="columns_apart"), torch.bfloat16, "triton"),
        (HOPPER, Case(n_q=63, d=128), torch.bfloat16, "triton"),  # too short
        (BLACKWELL, Case(d=128), torch.bfloat16, "triton"),
        (AMPERE, Case(d=128), torch.bfloat16, "triton"),
    ],
    ids=str,
)
def test_where_the_forward_pass_is_the_one_in_gluon(
    capability: tuple[int, int], case: Case, dtype: torch.dtype, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(shared_memory_per_block_optin=227 * 1024, L2_cache_size=50 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: device)
    monkeypatch.setattr(flash_triton, "INTERPRET", False)
    monkeypatch.setattr(flash_triton, "TMA_FROM_SCORES", 2 * 64 * 64)
    monkeypatch.setattr(flash_triton, "Launch", lambda kernel, *_, **__: kernel)
    q, k, v = (x.detach()[None] for x in case.inputs(dtype, "cpu")[:3])
    chosen = flash_triton._forward_launch(q, k, v, torch.empty_like(q), True)
    kernels = {"gluon": flash_triton.gluon.forward_kernel, "triton": flash_triton.forward_kernel}
    assert chosen is kernels[expected]


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
