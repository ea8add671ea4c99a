"""Clipping, AdamW and the 16-bit weights in one kernel, against float64 and the plain PyTorch form."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is only there on Linux")
from cs336_systems.kernels.adamw import BLOCK, Tables, adamw, square_sum
from cs336_systems.training.optimizer import adamw_torch, halves, joined

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled where there is a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# Odd sizes, whole blocks, several blocks, one element, none, and many that are small.
SHAPES = [(5,), (BLOCK,), (2, BLOCK // 2 + 8), (300, 31), (16, 16), (1,), (0, 3), (3 * BLOCK + 1,), *[(7, 3)] * 12]
KINDS = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32),
         (torch.float16, torch.float16)]  # fmt: skip
"""Dtypes of the model's weight and of its gradient."""
HYPER: dict[str, Any] = dict(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def scalar(value: float, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def new_states(device: str) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    states = []
    for i, shape in enumerate(SHAPES):
        master = torch.randn(shape, generator=generator).to(device)
        dtype = KINDS[i % len(KINDS)][0]
        weight = master if dtype == torch.float32 else master.to(dtype)
        if dtype == torch.bfloat16:
            weight, master = halves(master)
        states.append([scalar(0, device), master, *(torch.zeros(shape, device=device) for _ in range(2)), weight])
    return states


def new_gradients(device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).to(device, KINDS[i % len(KINDS)][1]) for i, shape in enumerate(SHAPES)
    ]


def run(step: Any, device: str, factors: list[float], betas: tuple[float, float] = (0.9, 0.95)) -> list[list[Tensor]]:
    """The states after a step for each factor."""
    states = new_states(device)
    lr = scalar(0.0, device, torch.float64)
    for number, factor in enumerate(factors):
        lr.fill_(0.01 * (number + 1))
        for state in states:
            state[0] += factor > 0
        gradients = new_gradients(device, number)
        step(gradients, states, factor=scalar(factor, device), lr=lr, **HYPER | dict(betas=betas))
    return states


def weights_and_moments(state: list[Tensor]) -> list[Tensor]:
    """Float32 weights, which a state may have in halves, and both moments."""
    return [joined(state[4], state[1]), *state[2:4]]


def in_float64(factors: list[float], betas: tuple[float, float]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Weights and moments by the formulas of Loshchilov and Hutter, in float64."""
    results = []
    for i, state in enumerate(new_states("cpu")):
        w, m, v, t = joined(state[4], state[1]).double(), 0.0, 0.0, 0
        for number, factor in enumerate(factors):
            if not factor > 0:
                continue
            t += 1
            g = new_gradients("cpu", number)[i].double() * scalar(factor, "cpu").double()
            lr = 0.01 * (number + 1)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            w = w * (1 - lr * HYPER["weight_decay"])
            w = w - lr * (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + HYPER["eps"])
        results.append((w, m, v))
    return results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("is_plain", [False, True], ids=["triton", "plain"])
def test_several_steps_are_those_in_float64(is_plain: bool, betas: tuple[float, float], device: str) -> None:
    tables = Tables()
    factors = [1.0, 0.3, 0.7]
    step = adamw_torch if is_plain else lambda *given, **more: adamw(*given, tables, **more)
    for state, wanted in zip(run(step, device, factors, betas), in_float64(factors, betas), strict=True):
        for found, expected in zip(weights_and_moments(state), wanted, strict=True):
            torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-5, atol=1e-6)
        # The interpreter cuts digits off where a GPU rounds.
        last_digit = torch.finfo(state[4].dtype).eps if device == "cpu" and not is_plain else 0
        torch.testing.assert_close(state[4], joined(state[4], state[1]).to(state[4].dtype), rtol=last_digit, atol=0)


ODD_BITS = [0, -(2**31), 0x7F800000, -0x800000, 0x7FFFFFFF, -1, 0x7F800001, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000]
"""Zeros, infinities, NaNs, the largest and the smallest number, ties that are rounded down and up."""


def test_halves_are_the_rounded_weight_and_what_rounding_took_away() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    weights = torch.cat([torch.tensor(ODD_BITS), bits]).to(torch.int32).view(torch.float32)
    upper, lower = halves(weights)
    assert torch.equal(upper.nan_to_num(), weights.bfloat16().nan_to_num())
    again, is_nan = joined(upper, lower), weights.isnan()
    assert torch.equal(again.isnan(), is_nan)
    lost = (weights.view(torch.int32) - again.view(torch.int32))[~is_nan]
    is_tie_rounded_down = (weights.view(torch.int32) & 0x1FFFF) == 0x8000
    assert torch.equal(lost, is_tie_rounded_down[~is_nan].int())


@pytest.mark.parametrize("device", DEVICES)
def test_weights_of_odd_bits_are_halved_as_in_the_plain_form(device: str) -> None:
    """With an update of nothing."""
    weights = torch.tensor(ODD_BITS).to(torch.int32).view(torch.float32)
    found = []
    for step in (lambda *given, **more: adamw(*given, Tables(), **more), adamw_torch):
        upper, lower = (half.to(device) for half in halves(weights))
        zeros = [torch.zeros_like(upper, dtype=torch.float32) for _ in range(2)]
        state = [scalar(1, device), lower, *zeros, upper]
        how = dict(factor=scalar(1, device), lr=scalar(0, device, torch.float64))
        step([torch.zeros_like(upper)], [state], **how, **HYPER)
        found.append((upper.cpu(), joined(upper, lower).cpu()))
    for ours, plain in zip(*found, strict=True):
        assert torch.equal(ours.isnan(), weights.isnan())
        assert torch.equal(ours.nan_to_num(), plain.nan_to_num())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_weights_that_are_set_to_zero_stay_numbers(zero: float, device: str) -> None:
    for step in (lambda *given, **more: adamw(*given, Tables(), **more), adamw_torch):
        upper, lower = (half.to(device) for half in halves(torch.linspace(-1, 1, 3000)))
        upper[::2] = zero
        state = [scalar(1, device), lower, *torch.zeros(2, 3000, device=device), upper]
        how = dict(factor=scalar(1, device), lr=scalar(0, device, torch.float64))
        step([torch.zeros_like(upper)], [state], **how, **HYPER)
        assert joined(upper, lower)[::2].abs().max() < 2.0**-130


@pytest.mark.parametrize("device", DEVICES)
def test_a_factor_of_nothing_changes_nothing(device: str) -> None:
    for skipped in (0.0, math.nan):
        tables = Tables()
        found = run(lambda *given, table=tables, **more: adamw(*given, table, **more), device, [1.0, skipped])
        for state, expected in zip(found, run(adamw_torch, device, [1.0]), strict=True):
            torch.testing.assert_close(weights_and_moments(state), weights_and_moments(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_follows_gradients_that_move_and_change_their_kind(device: str) -> None:
    tables, lr, factor = Tables(), scalar(0.01, device, torch.float64), scalar(1, device)
    states, expected = new_states(device)[:4], new_states(device)[:4]
    for number, change in enumerate(
        (lambda g: g, torch.clone, torch.Tensor.float, lambda g: torch.cat([g, g])[len(g) :])
    ):
        gradients = [change(g) for g in new_gradients(device, number)[:4]]
        for state in (*states, *expected):
            state[0] += 1
        adamw(gradients, states, tables, factor=factor, lr=lr, **HYPER)
        adamw_torch(gradients, expected, factor=factor, lr=lr, **HYPER)
    for state, wanted in zip(states, expected, strict=True):
        torch.testing.assert_close(weights_and_moments(state), weights_and_moments(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_of_squares_is_that_of_float64_and_gives_the_same_bits(device: str) -> None:
    tables = Tables()
    gradients = new_gradients(device, 3)
    expected = sum(float(g.double().square().sum()) for g in gradients)
    first, second = (square_sum(gradients, tables) for _ in range(2))
    assert first.item() == pytest.approx(expected, rel=1e-6)
    assert torch.equal(first, second)
    gradients[3][-1, -1] = math.inf
    assert square_sum(gradients, tables).isinf()


@pytest.mark.gpu
def test_a_recorded_step_reads_the_gradients_of_the_recording() -> None:
    tables, norms = Tables(), Tables()
    states, lr, factor = new_states("cuda"), scalar(0.01, "cuda", torch.float64), scalar(1, "cuda")
    sources = new_gradients("cuda", 0)

    def step() -> Tensor:
        gradients = [source * 1 for source in sources]  # new tensors, as autograd makes them
        torch._foreach_add_([state[0] for state in states], [(factor > 0).float()] * len(states))
        total = square_sum(gradients, norms)
        adamw(gradients, states, tables, factor=factor, lr=lr, **HYPER)
        return total

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = step()
    for number in range(1, 4):
        for source, new in zip(sources, new_gradients("cuda", number), strict=True):
            source.copy_(new)
        lr.fill_(0.01 * (number + 1))
        factor.fill_(0.0 if number == 2 else 1.0)
        graph.replay()
        expected = sum(float(g.double().square().sum()) for g in sources)
        assert total.item() == pytest.approx(expected, rel=1e-6)
    wanted = run(adamw_torch, "cuda", [1.0, 1.0, 0.0, 1.0])
    for state, other in zip(states, wanted, strict=True):
        torch.testing.assert_close(weights_and_moments(state), weights_and_moments(other), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_parameter_of_more_than_32_bits_of_bytes() -> None:
    size = 2**31 // 2 + 2 * BLOCK + 3  # its moments have more than 2^32 bytes
    gradient = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    moments = [torch.zeros(size, device="cuda") for _ in range(2)]
    state = [scalar(1, "cuda"), torch.zeros(size, dtype=torch.int16, device="cuda"), *moments, gradient.clone()]
    lr = scalar(0.5, "cuda", torch.float64)
    adamw([gradient], [state], Tables(), factor=scalar(1, "cuda"), lr=lr, **HYPER)
    torch.testing.assert_close(state[4].amin(), state[4].amax())
    assert float(joined(state[4][-1:], state[1][-1:])) == pytest.approx(1 - 0.05 - 0.5, rel=1e-5)
    assert float(square_sum([gradient], Tables())) == pytest.approx(size, rel=1e-6)


def test_a_gradient_on_a_cpu_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs336_systems.kernels.launch.INTERPRET", False)
    with pytest.raises(ValueError, match="a gradient is on cpu: adamw needs a CUDA device"):
        adamw(new_gradients("cpu", 0), new_states("cpu"), Tables(), factor=scalar(1, "cpu"),
              lr=scalar(1, "cpu", torch.float64), **HYPER)  # fmt: skip
