"""The loss that never holds all logits, against the plain one in value and gradients."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import LMHead
from cs336_basics.nn_utils import linear_cross_entropy
from cs336_systems.kernels.linear_cross_entropy import chunked_linear_cross_entropy, loss_and_gradient

TOKENS, D, VOCAB = (3, 7), 16, 53


def inputs(dtype: torch.dtype = torch.float64, scale: float = 1.0, device: str = "cpu") -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(*TOKENS, D, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, D, dtype=torch.float64, generator=generator) / 4
    targets = torch.randint(VOCAB, TOKENS, generator=generator).to(device)
    return *(t.to(device, dtype).requires_grad_() for t in (x, weight)), targets


def value_and_gradients(function: Any, x: Tensor, weight: Tensor, targets: Tensor, **how: Any) -> list[Tensor]:
    loss = function(x, weight, targets, **how)
    (1.7 * loss).backward()  # a gradient that is not one
    return [loss.detach(), *(t.grad for t in (x, weight) if t.grad is not None)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 100])
@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("dtype, rtol", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_value_and_gradients_equal_the_loss_of_all_logits(
    dtype: torch.dtype, rtol: float, scale: float, chunk_tokens: int, reduction: str
) -> None:
    truth = value_and_gradients(linear_cross_entropy, *inputs(scale=scale), reduction=reduction)
    ours = functools.partial(chunked_linear_cross_entropy, chunk_tokens=chunk_tokens)
    found = value_and_gradients(ours, *inputs(dtype, scale), reduction=reduction)
    for actual, expected in zip(found, truth, strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


def test_the_plain_loss_equals_pytorchs() -> None:
    x, weight, targets = inputs()
    expected = nn.functional.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets), expected, rtol=1e-12, atol=0)


def relative_errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double().cpu() - e).norm() / e.norm()) for a, e in zip(found, truth, strict=True)]


def check_bfloat16(device: str) -> None:
    """As right as all logits at once in bfloat16, and the weight's gradient as right as one rounding of it."""
    exact = inputs(torch.bfloat16)
    truth = value_and_gradients(
        linear_cross_entropy, *(t.detach().double().requires_grad_() for t in exact[:2]), exact[2]
    )
    plain = value_and_gradients(linear_cross_entropy, *inputs(torch.bfloat16, device=device))
    ours = functools.partial(chunked_linear_cross_entropy, chunk_tokens=4)
    found = value_and_gradients(ours, *inputs(torch.bfloat16, device=device))
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for own, theirs in zip(relative_errors(found, truth), relative_errors(plain, truth), strict=True):
        assert own <= 1.5 * theirs + 1e-4


def test_in_bfloat16_it_is_as_right_as_the_plain_loss() -> None:
    check_bfloat16("cpu")


@pytest.mark.gpu
def test_in_bfloat16_it_is_as_right_as_the_plain_loss_on_a_gpu() -> None:
    check_bfloat16("cuda")


def test_the_gradient_of_the_weight_is_summed_in_float32() -> None:
    """A sum of 512 equal terms of bfloat16 would stop growing at 256 of them."""
    x = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    chunked_linear_cross_entropy(x, weight, torch.zeros(512, dtype=torch.long), "sum", chunk_tokens=1).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-256.0], [256.0]]


def test_equals_the_plain_loss_under_autocast() -> None:
    results = []
    for function in (linear_cross_entropy, functools.partial(chunked_linear_cross_entropy, chunk_tokens=5)):
        x, weight, targets = inputs(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x, weight, targets)
        loss.backward()
        assert x.grad is not None
        assert weight.grad is not None
        results.append([loss.detach(), x.grad, weight.grad])
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("chunk_tokens", [1, 6])
def test_memory_holds_the_logits_of_one_chunk(chunk_tokens: int) -> None:
    seen = []

    def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(logits))
        return loss_and_gradient(logits, targets)

    x, weight, targets = inputs()
    chunked_linear_cross_entropy(x, weight, targets, chunk_tokens=chunk_tokens, rows_loss=counted)
    assert max(seen) <= chunk_tokens
    assert sum(seen) == targets.numel()


def test_without_gradients_none_are_computed() -> None:
    x, weight, targets = inputs()

    def never(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError

    with torch.no_grad():
        found = chunked_linear_cross_entropy(x, weight, targets, chunk_tokens=4, rows_loss=never)
    torch.testing.assert_close(found, linear_cross_entropy(x, weight, targets).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("chunk_tokens", [4, 5])
def test_only_required_gradients_are_computed(frozen: int, chunk_tokens: int) -> None:
    x, weight, targets = inputs()
    (x, weight)[frozen].requires_grad_(False)
    chunked_linear_cross_entropy(x, weight, targets, chunk_tokens=chunk_tokens).backward()
    assert [t.grad is None for t in (x, weight)] == [frozen == 0, frozen == 1]


@pytest.mark.parametrize("is_training", [False, True])
def test_a_target_that_is_no_token_is_refused_with_gradients_and_without(is_training: bool) -> None:
    x, weight, targets = inputs()
    targets[1, 2] = -100  # which PyTorch's loss would ignore
    with torch.set_grad_enabled(is_training), pytest.raises((RuntimeError, IndexError), match=r"-100 is out of bounds"):
        chunked_linear_cross_entropy(x, weight, targets, chunk_tokens=4)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(targets=torch.zeros(7, 3, dtype=torch.long)), r"targets are .* \(7, 3\): they must be .* \(3, 7\)"),
        (dict(targets=torch.zeros(1, dtype=torch.long)), r"targets are .* of shape \(1,\)"),
        (dict(targets=torch.zeros(3, 7)), r"targets are torch.float32 .*: they must be integers"),
        (dict(reduction="none"), "reduction is 'none'"),
    ],
)
def test_other_targets_and_reductions_are_refused(change: dict[str, Any], message: str) -> None:
    given = dict(zip(("x", "weight", "targets"), inputs(), strict=True)) | {"chunk_tokens": 4}
    with pytest.raises(ValueError, match=f"^{message}"):
        chunked_linear_cross_entropy(**(given | change))


def test_targets_may_be_any_integers() -> None:
    x, weight, targets = inputs()
    expected = chunked_linear_cross_entropy(x, weight, targets, chunk_tokens=4)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(chunked_linear_cross_entropy(x, weight, targets.to(dtype), chunk_tokens=4), expected)
        with torch.no_grad():
            found = chunked_linear_cross_entropy(x, weight, targets.to(dtype), chunk_tokens=4)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)


def test_second_derivatives_are_refused() -> None:
    x, weight, targets = inputs()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(chunked_linear_cross_entropy(x, weight, targets, chunk_tokens=4), x, create_graph=True)


def test_a_second_backward_is_refused() -> None:
    loss = chunked_linear_cross_entropy(*inputs(), chunk_tokens=4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was called before"):
        loss.backward()


def test_the_head_gives_logits_or_their_loss() -> None:
    head = LMHead(D, VOCAB).double()
    x, _, targets = inputs()
    expected = nn.functional.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(head(x, targets), expected, rtol=1e-12, atol=0)
    head.loss = functools.partial(chunked_linear_cross_entropy, chunk_tokens=4)
    torch.testing.assert_close(head(x, targets), expected, rtol=1e-12, atol=0)
