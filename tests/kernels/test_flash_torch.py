import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_basics.attention import Documents
from cs336_systems.kernels.attention import flash_torch
from cs336_systems.kernels.attention.function import Saved
from tests.kernels.attention_cases import (
    CASES,
    NAMES,
    QUICK_CASES,
    Case,
    FlashKernelTests,
    KernelTests,
    check_close,
    check_hidden_tiles_are_skipped,
    compute_truth,
    gradients,
    plain_attention,
)


class TestFlashTorch(FlashKernelTests):
    """A tile holds everything at the lengths of the cases."""

    name = "flash_torch"
    bands = True
    function = flash_torch.FlashAttentionTorch
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    cases = QUICK_CASES
    random_examples = 10


class TestFlashTorchOfManyTiles(KernelTests):
    """Tiles of 16 x 16. The compiler of a layer does not see them, so it has nothing to do here."""

    name = "flash_torch"
    bands = True
    random_examples = 10
    test_compiles_with_a_layer_without_graph_break = None

    @pytest.fixture(autouse=True)
    def _smallest_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flash_torch, "_TILE_SCORES", {"cpu": 1})
        assert flash_torch.tile_size(1, "cpu") == 16


@pytest.mark.gpu
class TestFlashTorchOnGpu(FlashKernelTests):
    name = "flash_torch"
    bands = True
    function = flash_torch.FlashAttentionTorch
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_q, n_k", [(20, 20), (17, 40), (40, 17)])
def test_gradients_equal_finite_differences(
    n_q: int, n_k: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_torch, "_TILE_SCORES", {"cpu": 1})
    q, k, v = (torch.randn(1, n, 2, dtype=torch.float64, requires_grad=True) for n in (n_q, n_k, n_k))
    assert torch.autograd.gradcheck(lambda *x: flash_torch.flash_torch(*x, is_causal), (q, k, v))


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "another"])
@pytest.mark.parametrize("batch", [0, 1, 3, 64, 10**9])
def test_tiles_are_powers_of_two_that_fit(batch: int, device_type: str) -> None:
    size = flash_torch.tile_size(batch, device_type)
    assert size >= 16
    assert size & (size - 1) == 0
    assert size == 16 or batch * size**2 <= flash_torch._TILE_SCORES.get(device_type, 2**18)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation gives."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_grows_with_the_square_of_the_length(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_torch, "_TILE_SCORES", {"cpu": 2**14})
    n, d = 2048, 8
    q, k, v, dO = (torch.randn(1, n, d) for _ in range(4))
    with LargestTensor() as largest:
        o, logsumexp = flash_torch._forward(q, k, v, is_causal)
        flash_torch._backward(dO, Saved(q, k, v, o, logsumexp, is_causal), True, True)
    assert largest.numel <= n * d


@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_above_the_diagonal_are_skipped(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_torch, "_TILE_SCORES", {"cpu": 16**2})
    done = []
    one_tile = flash_torch._gradients
    monkeypatch.setattr(flash_torch, "_gradients", lambda *args: done.append(args[-1] is not None) or one_tile(*args))
    q, k, v = (torch.randn(1, 160, 8, requires_grad=True) for _ in range(3))
    flash_torch.flash_torch(q, k, v, is_causal).sum().backward()
    assert len(done) == (55 if is_causal else 100)
    assert sum(done) == (10 if is_causal else 0)  # masked: those on the diagonal


def test_tiles_outside_of_a_window_and_of_documents_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_torch, "_TILE_SCORES", {"cpu": 64**2})
    check_hidden_tiles_are_skipped(flash_torch.flash_torch, torch.float32, 8)


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (2, 4, 0, 16)], ids=str)
def test_documents_without_tokens(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape)
    documents = Documents.from_numbers(torch.zeros(shape[0], shape[2]))
    assert flash_torch.flash_torch(q, q, q, True, documents=documents).shape == shape


# The backward pass that is one compiled function


def check_backward(case: Case, dtype: torch.dtype, backward: Callable[..., tuple[Tensor, ...]]) -> None:
    q, k, v, dO = case.inputs(dtype, "cpu")
    truth = compute_truth(q, k, v, dO, case.is_causal)
    plain = gradients(plain_attention(q, k, v, case.is_causal), [q, k, v], dO)
    o, logsumexp = flash_torch._forward(q.detach(), k.detach(), v.detach(), case.is_causal)
    saved = Saved(q.detach(), k.detach(), v.detach(), o, logsumexp, case.is_causal)
    results = backward(dO, saved, True, True)
    for name, result in zip(NAMES[1:], results, strict=True):
        check_close(name, result, truth.results[name], plain[name], truth)


@pytest.mark.parametrize("case", [case for case in CASES if case.needs == "qkv"], ids=str)
def test_backward_in_one_function_equals_the_truth(case: Case) -> None:
    check_backward(case, torch.float32, flash_torch.compiled_backward)


@pytest.mark.parametrize(
    "case, dtype",
    [
        (Case(70, 90, 24, leading=(2, 2), is_causal=True), torch.float32),
        (Case(40, 33, 24, leading=(2, 6), key_heads=2), torch.bfloat16),
    ],
    ids=str,
)
def test_backward_in_one_function_equals_the_truth_compiled(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_torch, "_WORTH_COMPILING", {"cpu": 1})
    check_backward(case, dtype, flash_torch.compiled_backward)
    assert not flash_torch._no_compiler_for


def test_sizes_share_their_compilations(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of which there may be more than PyTorch would make."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(flash_torch._gradients, dynamic=True, backend=counter)
    monkeypatch.setattr(flash_torch, "_compiled_gradients", lambda: compiled)
    monkeypatch.setattr(flash_torch, "_WORTH_COMPILING", {"cpu": 1})
    sizes = ((64, 64, 32, 2), (65, 40, 32, 2), (40, 65, 16, 3), (128, 128, 59, 4), (300, 300, 64, 8))
    with torch._dynamo.config.patch(recompile_limit=1):
        for n_q, n_k, d, batch in sizes:
            case = Case(n_q, n_k, d, leading=(batch,), is_causal=True)
            check_backward(case, torch.float32, flash_torch.compiled_backward)
            check_backward(case, torch.float32, flash_torch._backward)
    # On the diagonal and below it; each where there are as many queries as keys, and where there are not.
    assert 1 < counter.frame_count <= 4
    assert "recompile_limit" not in caplog.text
    before = counter.frame_count
    for needs in ("q", "kv", "v"):
        q, k, v, dO = Case(64, 64, 32, is_causal=True, needs=needs).inputs(torch.float32, "cpu")
        flash_torch.flash_torch(q, k, v, True).backward(dO)
    assert counter.frame_count == before  # whatever gradients are asked for


def test_without_a_compiler_it_runs_eagerly_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(flash_torch, "_no_compiler_for", set())
    monkeypatch.setattr(flash_torch, "_WORTH_COMPILING", {"cpu": 1})
    flash_torch._compiled_gradients.cache_clear()
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++"), "force_disable_caches": True})
    with no_compiler, caplog.at_level(logging.WARNING, flash_torch.__name__):
        for _ in range(2):
            check_backward(Case(33, 47, 24), torch.float32, flash_torch.compiled_backward)
    flash_torch._compiled_gradients.cache_clear()
    (record,) = [record for record in caplog.records if record.name == flash_torch.__name__]
    assert "attention runs without torch.compile on cpu" in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_are_not_copied_for_the_heads_that_share_them(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_torch, "_TILE_SCORES", {"cpu": 2**10})
    (q, dO), (k, v) = (torch.randn(2, 8, 64, 8) for _ in range(2)), (torch.randn(2, 1, 1024, 8) for _ in range(2))
    with LargestTensor() as largest:
        o, logsumexp = flash_torch._forward(q, k, v, is_causal)
        flash_torch._backward(dO, Saved(q, k, v, o, logsumexp, is_causal), True, True)
    assert largest.numel <= k.numel()
