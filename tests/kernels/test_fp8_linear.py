"""FP8 linear layers: what is rounded and how, against float64; and training with them."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import Linear
from cs336_systems.kernels.fp8_linear import BACKWARD, FORWARD, Fp8Linear, quantized, use_fp8

from ..training.helpers import make_config, tiny_trainer
from ..training.test_blocks import INDUCTOR_WITHOUT_ITS_CODE

D_IN, D_OUT, TOKENS = 64, 48, (2, 24)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Fp8Linear:
    torch.manual_seed(0)
    linear = Linear(D_IN, D_OUT).to(device, dtype)
    use_fp8(nn.Sequential(linear))
    assert isinstance(linear, Fp8Linear)
    return linear


def inputs(device: str = "cpu", tokens: tuple[int, int] = TOKENS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(*tokens, d, generator=generator).to(device, torch.bfloat16) for d in (D_IN, D_OUT))
    return x.requires_grad_(), dy * 1e-6  # gradients are small


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as FP8 holds it, in float64: its largest number is the format's, and there is one scale."""
    scale = torch.finfo(dtype).max / x.detach().double().abs().max()
    return (x.detach().double() * scale).float().to(dtype).double() / scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, (2, 20)])
def test_products_are_those_of_rounded_numbers(device: str, is_compiled: bool, tokens: tuple[int, int]) -> None:
    linear, (x, dy) = layer(device), inputs(device, tokens)
    y = (torch.compile(linear) if is_compiled else linear)(x)
    y.backward(dy)
    x8, w8, dy8 = rounded(x, FORWARD), rounded(linear.weight, FORWARD), rounded(dy, BACKWARD)
    factors = (dy8, x8) if tokens == TOKENS else (dy.double(), x.detach().double())
    of_dy, of_x = (factor.flatten(0, 1) for factor in factors)
    expected = {"y": x8 @ w8.T, "dx": dy8 @ w8, "dW": of_dy.T @ of_x}
    found = {"y": y, "dx": x.grad, "dW": linear.weight.grad}
    for name, truth in expected.items():
        result = found[name]
        assert result is not None
        assert (result.dtype, result.shape) == (torch.bfloat16, truth.shape), name
        # One rounding of the result to bfloat16. A number half way between two of FP8 may go either way, as the scale
        # is rounded itself: that moves a few of the sums.
        error = (result.double() - truth).norm() / truth.norm()
        assert error < 4e-3, (name, error)


def test_errors_are_those_of_fp8() -> None:
    linear, (x, dy) = layer(), inputs()
    y = linear(x)
    y.backward(dy)
    wide_x, wide_w = x.detach().double(), linear.weight.detach().double()
    wide_dW = dy.double().flatten(0, 1).T @ wide_x.flatten(0, 1)
    pairs = [(y, wide_x @ wide_w.T), (x.grad, dy.double() @ wide_w), (linear.weight.grad, wide_dW)]
    errors = [
        float((result.detach().double() - truth).norm() / truth.norm()) for result, truth in pairs if result is not None
    ]
    # Rounding to m bits of mantissa has an error of about 2^-m / sqrt(12) / 1.4, here of both factors.
    assert 0.02 < errors[0] < 0.05
    assert 0.04 < errors[1] < 0.08
    assert 0.04 < errors[2] < 0.08


@pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
@pytest.mark.parametrize("largest", [1e-20, 1.0, 1e20])
def test_the_largest_number_becomes_that_of_the_format(dtype: torch.dtype, largest: float) -> None:
    x = torch.linspace(-1, 0.5, 33) * largest
    x8, inverse = quantized(x, dtype)
    assert x8.float().min() == -torch.finfo(dtype).max
    assert float(inverse) * torch.finfo(dtype).max == pytest.approx(largest)


def test_zeros_stay_zeros() -> None:
    linear, (x, dy) = layer(), inputs()
    y = linear(x * 0)
    y.backward(dy * 0)
    assert y.abs().max() == 0
    assert x.grad is not None
    assert x.grad.abs().max() == 0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_seen_in_the_product(bad: float) -> None:
    linear, (x, dy) = layer(), inputs()
    with torch.no_grad():
        x[0, 0, 0] = bad
    assert not linear(x)[0, 0].isfinite().any()
    x, dy = inputs()
    dy[0, 0, 0] = bad
    linear(x).backward(dy)
    assert x.grad is not None
    assert not x.grad[0, 0].isfinite().any()


def test_float32_weights_are_cast_as_autocast_says() -> None:
    narrow, wide, (x, dy) = layer(), layer(dtype=torch.float32), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = wide(x.float())
    assert torch.equal(y, narrow(x))
    y.backward(dy)
    assert wide.weight.grad is not None
    assert wide.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("shape", [(40, 32), (32, 40)])
def test_sizes_that_tensor_cores_refuse_are_named(shape: tuple[int, int]) -> None:
    model = nn.ModuleDict({"ffn": Linear(*shape)})
    with pytest.raises(ValueError, match=r"^ffn.weight has shape .*40.*'fp8' both sizes must be multiples of 16"):
        use_fp8(model)


# Training


def losses_of(steps: int = 6, device: str = "cpu", **groups: Any) -> list[float]:
    config = make_config(Path("unused"), **groups)
    with tiny_trainer(config, device=device) as trainer:
        losses = [row["loss"] for row in trainer.train_steps(steps)]
        fp8 = [type(m) is Fp8Linear for m in trainer.model.modules() if isinstance(m, Linear)]
        assert fp8 == [True] * (len(fp8) - 1) + [False]  # all but the head
        return losses


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("settings", [{}, {"compile": True}, {"gradient_accumulation_steps": 2}])
def test_losses_are_near_those_of_bf16(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The products above have Inductor's own code, which takes half a minute to make for a model."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=INDUCTOR_WITHOUT_ITS_CODE))
    config = make_config(Path("unused"), train=dict(precision="bf16", **settings))
    with tiny_trainer(config) as trainer:
        wide = [row["loss"] for row in trainer.train_steps(6)]
    losses = losses_of(train=dict(precision="fp8", **settings))
    assert losses == pytest.approx(wide, abs=0.02)
    assert losses != pytest.approx(wide, abs=1e-5)
