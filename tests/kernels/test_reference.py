"""The truth itself against sums written out, and the criterion against attention that is wrong."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cs336_basics.attention import scaled_dot_product_attention
from cs336_systems.kernels.attention import reference
from cs336_systems.kernels.attention.contract import repeat_heads
from cs336_systems.kernels.attention.reference import attention_with_logsumexp, naive, vectorized_torch
from tests.kernels.attention_cases import QUICK_CASES, Case, KernelTests, check_case

ALL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def written_out(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of (N, D) tensors, one pair at a time, in Python's float64."""
    o, logsumexp = torch.zeros_like(q), torch.full(q.shape[:1], -math.inf, dtype=q.dtype)
    for i in range(len(q)):
        keys = [j for j in range(len(k)) if j <= i or not is_causal]
        weights = [math.exp(math.fsum((q[i] * k[j]).tolist()) / math.sqrt(q.shape[1])) for j in keys]
        if keys:
            logsumexp[i] = math.log(math.fsum(weights))
            o[i] = sum(weight * v[j] for weight, j in zip(weights, keys, strict=True)) / math.fsum(weights)
    return o, logsumexp


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (7, 7), (3, 9), (9, 3), (4, 0), (0, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_truth_equals_sums_written_out(n_q: int, n_k: int, is_causal: bool) -> None:
    q, k, v = (torch.randn(n, 5, dtype=torch.float64) for n in (n_q, n_k, n_k))
    for result, expected in zip(
        attention_with_logsumexp(q, k, v, is_causal), written_out(q, k, v, is_causal), strict=True
    ):
        torch.testing.assert_close(result, expected, rtol=1e-13, atol=1e-13)


def test_truth_has_pytorchs_gradients_and_those_of_its_logsumexp() -> None:
    q, k, v = (torch.randn(2, n, 5, dtype=torch.float64, requires_grad=True) for n in (6, 8, 8))
    for is_causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda *x, is_causal=is_causal: attention_with_logsumexp(*x, is_causal), (q, k, v)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_truth_computes_in_float32_also_under_autocast(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 20, 16).to(dtype) for _ in range(3))
    expected, expected_logsumexp = attention_with_logsumexp(q.float(), k.float(), v.float(), True)
    with torch.autocast("cpu", torch.bfloat16):
        o, logsumexp = attention_with_logsumexp(q, k, v, True)
    assert (o.dtype, logsumexp.dtype) == (dtype, torch.float32)
    assert torch.equal(o, expected.to(dtype))
    assert torch.equal(logsumexp, expected_logsumexp)


class TestNaive(KernelTests):
    name = "naive"
    bands = True
    dtypes = ALL_DTYPES
    cases = QUICK_CASES
    random_examples = 10


class TestVectorizedTorch(KernelTests):
    name = "vectorized_torch"
    bands = True
    dtypes = ALL_DTYPES
    cases = QUICK_CASES
    random_examples = 10


@pytest.mark.gpu
class TestVectorizedTorchOnGpu(KernelTests):
    name = "vectorized_torch"
    bands = True
    device = "cuda"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)


def test_the_mask_is_kept_and_can_be_trained_with_after_inference() -> None:
    reference._cached_hidden_keys.cache_clear()
    q, k, v = (torch.randn(2, 9, 4, requires_grad=True) for _ in range(3))
    with torch.inference_mode():
        vectorized_torch(q, k, v, True)
    vectorized_torch(q, k, v, True).sum().backward()
    info = reference._cached_hidden_keys.cache_info()
    assert (info.misses, info.hits) == (1, 1)
    for n in range(2 * info.maxsize):
        vectorized_torch(q[:, :n], k, v, True)
    assert reference._cached_hidden_keys.cache_info().currsize == info.maxsize


def bottom_right(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    if not is_causal:
        return naive(q, k, v, False)
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1 + k.shape[-2] - q.shape[-2])
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1) @ v


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return naive(q.bfloat16(), k.bfloat16(), v.bfloat16(), is_causal).to(q.dtype)


def with_products_of_11_bits(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """A float32 kernel with TF32: factors keep 10 bits behind the point."""

    def cut(x: Tensor) -> Tensor:
        return x + ((x.detach().view(torch.int32) & ~0x1FFF).view(torch.float32) - x.detach())

    return naive(cut(q), cut(k), cut(v), is_causal)


WRONG: dict[str, tuple[Callable[..., Tensor], Case]] = {
    "mask left out": (lambda q, k, v, is_causal: naive(q, k, v, False), Case(is_causal=True)),
    "mask aligned at the bottom right": (bottom_right, Case(20, 30, is_causal=True)),
    "mask off by one": (
        lambda q, k, v, is_causal: naive(torch.cat((q[..., :1, :], q), -2), k, v, True)[..., 1:, :],
        Case(is_causal=True),
    ),
    "a scale of 1 / D": (lambda q, k, v, c: naive(q / math.sqrt(q.shape[-1]), k, v, c), Case()),
    "the last key left out": (lambda q, k, v, c: naive(q, k[..., :-1, :], v[..., :-1, :], c), Case(200, 200)),
    "a key of zeros more": (
        lambda q, k, v, c: naive(q, *(torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v)), c),
        Case(200, 200),
    ),
    "bfloat16 inside": (in_bfloat16, Case()),
    "TF32 inside": (with_products_of_11_bits, Case(65, 65)),
    "a gradient of q that is off": (lambda q, k, v, c: naive(1.00001 * q - 1e-5 * q.detach(), k, v, c), Case()),
    "a gradient of k that is off": (lambda q, k, v, c: naive(q, 1.00001 * k - 1e-5 * k.detach(), v, c), Case()),
    "no gradient": (lambda q, k, v, c: naive(q, k, v, c).detach(), Case()),
    "no gradient of v": (lambda q, k, v, c: naive(q, k, v.detach(), c), Case()),
    "a gradient of v that is off": (lambda q, k, v, c: naive(q, k, 1.00001 * v - 1e-5 * v.detach(), c), Case()),
    "no numbers": (lambda q, k, v, c: naive(q, k, v, c) * math.nan, Case()),
    "inputs written to": (lambda q, k, v, c: naive(q, k, v.detach().mul_(2) * 0 + v, c) + 0 * q, Case()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_criterion_sees_attention_that_is_wrong(wrong: str) -> None:
    attention, case = WRONG[wrong]
    check_case(naive, case, torch.float32, "cpu")
    with pytest.raises(AssertionError):
        check_case(attention, case, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", ["mask off by one", "a scale of 1 / D", "the last key left out"])
def test_the_criterion_sees_it_in_low_precision_too(wrong: str, dtype: torch.dtype) -> None:
    attention, case = WRONG[wrong]
    with pytest.raises(AssertionError):
        check_case(attention, case, dtype, "cpu")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_truth_of_grouped_heads_is_the_models(key_heads: int, is_causal: bool) -> None:
    q, k, v = (torch.randn(2, heads, n, 5).double() for heads, n in ((6, 7), (key_heads, 9), (key_heads, 9)))
    o, logsumexp = attention_with_logsumexp(q, k, v, is_causal)
    torch.testing.assert_close(o, scaled_dot_product_attention(q, k, v, is_causal), rtol=1e-13, atol=1e-13)
    for head in range(6):
        j = head * key_heads // 6
        expected = attention_with_logsumexp(q[:, head], k[:, j], v[:, j], is_causal)
        torch.testing.assert_close((o[:, head], logsumexp[:, head]), expected, rtol=1e-13, atol=1e-13)


def with_heads_in_turn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Query head i is served by key head i % H_kv, not i // G."""
    return naive(q, *(x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k, v)), is_causal)


def with_one_head_of_the_group_in_dk(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    k, v = repeat_heads(q, k, v)
    first = torch.arange(k.shape[1])[:, None, None] % 2 == 0
    return naive(q, torch.where(first, k, k.detach()), v, is_causal)


@pytest.mark.parametrize("attention", [with_heads_in_turn, with_one_head_of_the_group_in_dk])
def test_the_criterion_sees_groups_that_are_wrong(attention: Callable[..., Tensor]) -> None:
    case = Case(33, 40, leading=(1, 4), key_heads=2)
    check_case(naive, case, torch.float32, "cpu")
    with pytest.raises(AssertionError):
        check_case(attention, case, torch.float32, "cpu")
