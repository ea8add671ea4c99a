import functools

import pytest
import torch

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
