import os
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is only there on Linux")
from cs336_systems.kernels.weighted_sum import WeightedSum, weighted_sum
from tests import forked

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SHAPES = [(16, 512), (1, 1), (17, 513), (5, 1030), (3, 2, 7, 33), (40,), (0, 8), (2, 0, 8), (4, 0)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(s, generator=generator).to(device, dtype) for s in (shape, shape[-1:], shape[:-1]))
    return x.requires_grad_(), weight.requires_grad_(), dy


def results(function, x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = function(x, weight)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def truth(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    return results(lambda x, weight: (x * weight).sum(-1), *wide, dy.double())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_float64(shape, dtype, device) -> None:
    given = inputs(shape, dtype, device)
    # One rounding of the result, and float32's in a sum of up to 1,030 terms.
    tolerance = dict(rtol=torch.finfo(dtype).eps, atol=2e-5)
    for result, expected in zip(results(weighted_sum, *given), truth(*given), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, **tolerance)


@pytest.mark.parametrize("device", DEVICES)
def test_takes_any_strides(device) -> None:
    x, weight, dy = (t.detach() for t in inputs((6, 5, 40), torch.float32, device))
    given = (x.transpose(0, 1).requires_grad_(), weight.expand(2, 40)[1].requires_grad_(), dy[0, 0].expand(5, 6))
    for result, expected in zip(results(weighted_sum, *given), truth(*given), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", range(3), ids=["x", "weight", "dy"])
def test_lazily_negated_tensors(which, device) -> None:
    given = [t.detach() for t in inputs((6, 40), torch.float32, device)]
    negated = [torch._neg_view(-t) if i == which else t.clone() for i, t in enumerate(given)]
    found, expected = (
        results(weighted_sum, *(t.requires_grad_() for t in some[:2]), some[2]) for some in (negated, given)
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("device", DEVICES)
def test_gives_the_same_bits_twice(device) -> None:
    first, second = (results(WeightedSum.apply, *inputs((100, 70), torch.float32, device)) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
def test_rows_beyond_32_bit_offsets() -> None:
    x = torch.ones(2**31 // 512 + 5, 512, dtype=torch.bfloat16, device="cuda").requires_grad_()
    weight = torch.ones(512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = weighted_sum(x, weight)
    y.sum().backward()
    assert y.eq(512).all()
    assert x.grad.eq(1).all()
    assert float(weight.grad[0]) == pytest.approx(len(x), rel=4e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, w: (x[0, 0], w), "^weight has shape"),
        (lambda x, w: (x, w[:-1]), "^weight has shape"),
        (lambda x, w: (x, w[None]), "^weight has shape"),
        (lambda x, w: (x.double(), w.double()), "^x is torch.float64"),
        (lambda x, w: (x, w.half()), "^weight is torch.float16"),
        (lambda x, w: (x, w.to("meta")), "^weight is on meta"),
    ],
)
def test_refuses_wrong_inputs(change, message, device) -> None:
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(ValueError, match=message):
        weighted_sum(*change(x, weight))


def test_a_cpu_without_the_interpreter_is_refused_by_name() -> None:
    program = (
        "import torch; from cs336_systems.kernels.weighted_sum import weighted_sum\n"
        "try: weighted_sum(torch.ones(2, 3), torch.ones(3))\n"
        "except ValueError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forked.run([sys.executable, "-c", program], 60, env=environment)
    assert done.stdout.startswith("x is on cpu: ")
    assert "TRITON_INTERPRET=1" in done.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_second_derivatives_are_refused(device: str) -> None:
    x, weight, _ = inputs((4, 7), torch.float32, device)
    y = weighted_sum(x.requires_grad_(), weight.requires_grad_())
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
