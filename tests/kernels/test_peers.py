"""The kernels of other projects pass the same cases as ours, unless they refuse them."""

import dataclasses
import importlib.util
import sys
import types
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from cs336_basics.attention import Documents, visible_keys
from cs336_systems.kernels.attention import get_attention, peers
from tests.kernels.attention_cases import (
    BAND_CASES,
    CASES,
    QUICK_CASES,
    Case,
    KernelTests,
    check_case,
    check_close,
    compute_truth,
    plain_attention,
)

ON_CPU = (torch.float32, torch.bfloat16)
LOW_PRECISION = (torch.bfloat16, torch.float16)


class PeerTests(KernelTests):
    """Skips the cases that a peer refuses with a ValueError."""

    cases = QUICK_CASES
    # On a CPU, PyTorch's flash kernel adds up dv in bfloat16.
    times_plain = 4
    # PyTorch lets kernels other than flash choose the order of their sums.
    test_gives_the_same_bits_twice = None

    def test_equals_the_truth(self, case: Case, dtype: torch.dtype) -> None:
        try:
            super().test_equals_the_truth(case, dtype)
        except ValueError as error:
            pytest.skip(str(error))

    def test_equals_the_truth_in_random_cases(self) -> None:
        pytest.skip("the fixed cases are enough for kernels of others")


class TestSdpa(PeerTests):
    name = "sdpa"
    cases = (*QUICK_CASES, *BAND_CASES)
    bands = True
    dtypes = ON_CPU


class TestSdpaMath(PeerTests):
    name = "sdpa_math"
    dtypes = ON_CPU


class TestSdpaFlash(PeerTests):
    name = "sdpa_flash"
    dtypes = ON_CPU


class OnGpu(PeerTests):
    device = "cuda"
    cases = CASES
    dtypes = LOW_PRECISION


@pytest.mark.gpu
class TestSdpaOnGpu(OnGpu):
    name = "sdpa"
    bands = True
    dtypes = (torch.float32, *LOW_PRECISION)


@pytest.mark.gpu
class TestSdpaMathOnGpu(OnGpu):
    name = "sdpa_math"
    dtypes = (torch.float32, *LOW_PRECISION)


@pytest.mark.gpu
class TestSdpaFlashOnGpu(OnGpu):
    name = "sdpa_flash"


@pytest.mark.gpu
class TestSdpaCudnnOnGpu(OnGpu):
    name = "sdpa_cudnn"


@pytest.mark.gpu
class TestFlexOnGpu(OnGpu):
    """Every shape is a compilation of seconds, so it gets few."""

    name = "flex"
    bands = True
    dtypes = (torch.bfloat16,)
    cases: ClassVar[tuple[Case, ...]] = (
        Case(128, 128, 64),
        Case(200, 200, 64, is_causal=True),
        Case(33, 70, 32, leading=(2, 3), is_causal=True),
        Case(70, 33, 32, leading=(2, 1, 3), is_causal=True, layout="heads_inside"),
        Case(33, 70, 32, leading=(2, 6), key_heads=2, is_causal=True),
        Case(16, 0, is_causal=True),
    )


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed")
class TestFa4OnGpu(OnGpu):
    name = "fa4"
    bands = True
    # With PyTorch 2.11 its interface asks whether it is traced, which the compiler does not trace: a graph break.
    test_compiles_with_a_layer_without_graph_break = None


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int | None, int | None]) -> Tensor:
    """FlashAttention-4's interface, (B, N, H, D), computed plainly."""
    mask = {} if window_size[0] is None else {"window": window_size[0] + 1}
    assert window_size[1] in (None, 0)
    return plain_attention(*(x.transpose(1, 2) for x in (q, k, v)), causal, **mask).transpose(1, 2)


def attend_packed(
    *q_k_v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, **mask: Any
) -> tuple[Tensor, None]:
    """Its interface for sequences of varying length, (total, H, D), each computed by itself."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert (cu_seqlens_q.dtype, max_seqlen_q) == (torch.int32, max_seqlen_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert all(0 < length <= max_seqlen_q for length in lengths)
    rows = zip(*(x.split(lengths) for x in q_k_v), strict=True)
    return torch.cat([attend(*(x[None] for x in row), **mask)[0] for row in rows]), None


@pytest.fixture
def fa4_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package flash-attn-4."""
    cute: Any = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func, cute.flash_attn_varlen_func = attend, attend_packed
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(peers, "_check_supported", lambda *_: None)


@pytest.mark.usefixtures("fa4_on_cpu")
@pytest.mark.parametrize(
    "case",
    [
        *(dataclasses.replace(case, d=32) for case in BAND_CASES if case.n_q),
        Case(24, 24, leading=(2, 2, 2), documents=(3, 20, 1), is_causal=True),
        Case(24, 24, leading=(2, 2), documents=(24,), is_causal=True),
    ],
    ids=str,
)
def test_fa4_gets_windows_and_documents(case: Case) -> None:
    check_case(peers.fa4, case, torch.float32, "cpu")


@pytest.mark.usefixtures("fa4_on_cpu")
def test_fa4_refuses_head_sizes_whose_gradients_are_wrong() -> None:
    q = torch.randn(1, 4, 80)
    with pytest.raises(ValueError, match="head size 80: fa4 serves multiples of 32"):
        peers.fa4(q, q, q)


@pytest.mark.usefixtures("fa4_on_cpu")
def test_fa4_counts_documents_once_and_can_train_after_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = Documents.from_numbers(torch.arange(12).view(2, 6) // 4)
    q = torch.randn(2, 1, 6, 32, requires_grad=True)
    with torch.inference_mode():
        peers.fa4(q, q, q, True, documents=documents)
    bounds = peers.document_bounds(documents.starts)
    assert bounds.tolist() == [0, 4, 6, 8, 12]
    assert not bounds.is_inference()
    monkeypatch.setattr(Tensor, "nonzero", None)  # it would wait for the GPU
    peers.fa4(q, q, q, True, documents=documents).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("name", ["sdpa_cudnn", "flex"])
def test_kernels_for_cuda_refuse_the_cpu(name: str) -> None:
    q = torch.ones(1, 1, 16, 16)
    with pytest.raises(ValueError, match=f"^q is on cpu: {name} needs a CUDA device$"):
        get_attention(name)(q, q, q)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn"])
def test_masks_that_peers_align_differently_are_refused(name: str) -> None:
    q, k = (torch.ones(1, 1, n, 64, device="cuda", dtype=torch.bfloat16) for n in (32, 64))
    with pytest.raises(ValueError, match=r"^is_causal is True with 32 queries and 64 keys: "):
        get_attention(name)(q, k, k, True)
    with pytest.raises(ValueError, match=r"^q is torch.float32: it must be one of"):
        get_attention(name)(q.float(), q.float(), q.float())


def test_a_kernel_pytorch_does_not_have_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*args: object, **kwargs: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(peers, "scaled_dot_product_attention", no_kernel)
    q = torch.ones(2, 3, 4, 8)
    with pytest.raises(ValueError, match=r"^q of shape \(2, 3, 4, 8\) and k of shape \(2, 3, 4, 8\), torch.float32"):
        peers.sdpa_flash(q, q, q)


# Not 17 queries and 40 keys: with AVX2 alone PyTorch 2.13's compiled FlexAttention is wrong there (docs/log.md).
@pytest.mark.slow
@pytest.mark.parametrize("n_q, n_k, leading", [(17, 48, (2,)), (40, 17, (2, 1, 2))])
def test_flex_masks_as_the_contract_says(n_q: int, n_k: int, leading: tuple[int, ...]) -> None:
    """Behind its check of the device, since PyTorch has its forward pass for the CPU."""
    case = Case(n_q, n_k, 16, leading=leading, is_causal=True, needs="")
    q, k, v, dO = case.inputs(torch.float32, "cpu")
    truth = compute_truth(q, k, v, dO, True)
    check_close("o", peers._flex(q, k, v, True), truth.results["o"], plain_attention(q, k, v, True), truth)


@pytest.mark.parametrize(
    "n_q, n_k, window, documents",
    [
        (40, 70, None, ()),
        (70, 33, None, ()),
        (70, 1, None, ()),
        (50, 50, None, ()),
        (50, 50, 7, ()),
        (50, 50, 7, (9, 20)),
    ],
)
def test_flex_gets_the_mask_of_the_contract(n_q: int, n_k: int, window: int | None, documents: tuple[int, ...]) -> None:
    numbers = sum(torch.arange(n_q) >= start for start in documents) if documents else None
    found = None if numbers is None else Documents.from_numbers(numbers)
    mask = peers._new_block_mask(n_q, n_k, torch.device("cpu"), window, found)
    sees = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(n_q)[:, None], torch.arange(n_k))
    assert torch.equal(sees, visible_keys(n_q, n_k, sees.device, window, found).reshape(n_q, n_k))


def test_flex_compiles_beyond_pytorchs_limit_instead_of_running_eagerly() -> None:
    torch._dynamo.reset()
    attention = peers._flex_attention
    with torch._dynamo.config.patch(recompile_limit=1), pytest.MonkeyPatch.context() as patch:
        compiled = torch.compile(attention, dynamic=False, fullgraph=True, backend="eager")
        patch.setattr(peers, "_compiled_flex", lambda: compiled)
        for n in (3, 4, 5):
            q = torch.ones(1, 1, n, 16)
            assert torch.equal(peers._run_compiled_flex(q, q, q, None), q)
        patch.setattr(peers, "_FLEX_SHAPES", 3)
        q = torch.ones(1, 1, 6, 16)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            peers._run_compiled_flex(q, q, q, None)


def test_flex_keeps_few_block_masks_that_training_can_use_after_inference() -> None:
    peers._cached_block_mask.cache_clear()
    with torch.inference_mode():
        mask = peers._block_mask(200, 300, torch.device("cpu"), None, None)
    assert not mask.kv_indices.is_inference()
    assert peers._block_mask(200, 300, torch.device("cpu"), None, None) is mask
    documents = Documents.from_numbers(torch.arange(200) // 70)
    mask = peers._block_mask(200, 200, torch.device("cpu"), None, documents)
    assert peers._block_mask(200, 200, torch.device("cpu"), None, documents) is mask
    assert peers._cached_block_mask.cache_info().maxsize is not None


@pytest.mark.slow
def test_flex_serves_groups() -> None:
    case = Case(40, 17, 16, leading=(2, 4), key_heads=2, needs="")
    q, k, v, dO = case.inputs(torch.float32, "cpu")
    truth = compute_truth(q, k, v, dO, False)
    check_close("o", peers._flex(q, k, v, False), truth.results["o"], plain_attention(q, k, v, False), truth)
