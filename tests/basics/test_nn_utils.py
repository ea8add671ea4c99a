"""Softmax, cross-entropy and clipping against PyTorch's own."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cs336_basics.nn_utils import clip_gradient, cross_entropy, softmax

LEADING = [(), (5,), (2, 3), (2, 1, 4)]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# Softmax


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("shape, dim", [((7,), -1), ((3, 7), 0), ((3, 7), -1), ((2, 5, 3), 1)])
def test_softmax_equals_torch(shape, dim, scale):
    x = scale * torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(softmax(x, dim), x.softmax(dim), rtol=1e-13, atol=1e-300)


def test_softmax_of_extreme_values_is_finite_and_exact():
    x = torch.tensor([[1e4, -1e4, 1e4], [-1e4, -1e4, -1e4], [3e38, 0.0, -3e38]])
    expected = torch.tensor([[0.5, 0.0, 0.5], [1 / 3] * 3, [1.0, 0.0, 0.0]])
    torch.testing.assert_close(softmax(x), expected)


def test_softmax_gives_no_probability_to_minus_infinity():
    x = torch.tensor([0.0, -math.inf, math.log(3)])
    torch.testing.assert_close(softmax(x), torch.tensor([0.25, 0.0, 0.75]))


# Cross-entropy


def torch_cross_entropy(logits, targets, reduction):
    result = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction=reduction)
    return result.reshape(targets.shape) if reduction == "none" else result


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_cross_entropy_and_its_gradient_equal_torch(leading, reduction, scale):
    logits = (scale * torch.randn(*leading, 11, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(11, leading)
    ours, theirs = (f(logits, targets, reduction) for f in (cross_entropy, torch_cross_entropy))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    d_loss = torch.randn_like(ours)
    d_ours, d_theirs = (torch.autograd.grad(loss, logits, d_loss)[0] for loss in (ours, theirs))
    torch.testing.assert_close(d_ours, d_theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("target, expected", [(0, 0.0), (1, 2e4), (2, 1e4)])
def test_cross_entropy_of_extreme_logits_is_exact(target, expected):
    assert cross_entropy(torch.tensor([1e4, -1e4, 0.0]), torch.tensor(target)).item() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_of_low_precision_logits_is_computed_in_float32(dtype):
    logits, targets = torch.randn(4, 9, 512).to(dtype), torch.randint(512, (4, 9))
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(torch_cross_entropy(logits.double(), targets, "mean").item(), rel=1e-6)


@pytest.mark.parametrize("reduction", ["avg", "", "Mean", None])
def test_cross_entropy_refuses_another_reduction(reduction):
    with pytest.raises(ValueError, match=r"reduction is .*'mean', 'sum' or 'none'"):
        cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), reduction)


# Clipping


def parameters_with_gradients(scale: float = 1.0) -> list[nn.Parameter]:
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (), (2, 2))]
    for p in parameters[:-1]:  # the last one has no gradient
        p.grad = scale * torch.randn(p.shape)
    return parameters


@pytest.mark.parametrize("max_norm", [1e-7, 1e-3, 1.0, 1e3, math.inf])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_clipping_equals_torch(max_norm, scale):
    ours, theirs = parameters_with_gradients(scale), parameters_with_gradients(scale)
    norm = clip_gradient(ours, max_norm)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for p, q in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
    assert ours[-1].grad is None


@pytest.mark.parametrize("max_norm", [5.1, math.inf])
def test_gradients_within_the_limit_stay_bit_equal(max_norm):
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    assert clip_gradient([p], max_norm).item() == 5.0
    assert p.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("parameters", [[], [nn.Parameter(torch.ones(3))]], ids=["no parameter", "no gradient"])
def test_the_norm_of_no_gradients_is_zero(parameters):
    assert clip_gradient(parameters, 1.0).item() == 0.0


def test_gradients_of_zero_stay_zero():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.zeros(3)
    assert clip_gradient([p], 1.0).item() == 0.0
    assert p.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad):
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, bad])
    assert not clip_gradient([p], 1.0).isfinite()
