"""Muon's momentum and its weights in one kernel each, against the plain PyTorch form."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is only there on Linux")
from cs336_systems.kernels.adamw import Tables
from cs336_systems.kernels.muon import directions, move
from cs336_systems.training.muon import directions_torch, move_torch
from cs336_systems.training.optimizer import halves, joined
from tests.kernels.test_adamw import DEVICES, KINDS, SHAPES, new_gradients, scalar

HYPER: dict[str, Any] = dict(size=0.2 * math.sqrt(31), weight_decay=0.1)


def new_states(device: str) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Momentum, and float32 weights with those that the model has."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
    dtypes = [KINDS[i % len(KINDS)][0] for i in range(len(SHAPES))]
    weights = [
        [*reversed(halves(m))] if dtype == torch.bfloat16 else [m, m.to(dtype)]
        for m, dtype in zip(masters, dtypes, strict=True)
    ]
    return [torch.zeros_like(m) for m in masters], weights


def step(
    gradients: list[Tensor], state: tuple[list[Tensor], list[list[Tensor]]], tables: Tables | None, **how: Tensor
) -> Tensor:
    """Directions, of which a third is the update. tables: of the kernels, None for the plain form."""
    buffers, weights = state
    of_kernels = [] if tables is None else [tables]
    found = (directions_torch if tables is None else directions)(
        gradients, buffers, *of_kernels, factor=how["factor"], momentum=0.9
    )
    updates = (found / 3).split([g.numel() for g in gradients])
    updates = [update.view_as(g) for update, g in zip(updates, gradients, strict=True)]
    (move_torch if tables is None else move)(updates, weights, *of_kernels, **how, **HYPER)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_several_steps_are_those_of_the_plain_form(device: str) -> None:
    """Of matrices of several shapes and dtypes, one of them empty, at odd places."""
    tables, state, expected = Tables(), new_states(device), new_states(device)
    for number, factor in enumerate((1.0, 0.3, 0.7)):
        how = dict(factor=scalar(factor, device), rate=scalar(0.01 * (number + 1), device, torch.float64))
        gradients = new_gradients(device, number)
        found, wanted = (step(gradients, each, of, **how) for each, of in ((state, tables), (expected, None)))
        # The interpreter cuts digits off where a GPU rounds.
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(state[0], expected[0], rtol=2e-5, atol=1e-6)
    for (master, weight), (other_master, other_weight) in zip(state[1], expected[1], strict=True):
        master, other = joined(weight, master), joined(other_weight, other_master)
        torch.testing.assert_close(master, other, rtol=1e-4, atol=1e-4)  # of updates whose last digit may differ
        last_digit = torch.finfo(weight.dtype).eps if device == "cpu" else 0
        torch.testing.assert_close(weight, master.to(weight.dtype), rtol=last_digit, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skipped", [0.0, math.nan])
def test_a_factor_of_nothing_changes_nothing(skipped: float, device: str) -> None:
    state = new_states(device)
    before = copy.deepcopy(state)
    gradients = [torch.full_like(g, math.nan) for g in new_gradients(device, 0)]
    how = dict(factor=scalar(skipped, device), rate=scalar(0.01, device, torch.float64))
    for tables in (Tables(), None):
        step(gradients, state, tables, **how)
        torch.testing.assert_close(state, before, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_recorded_step_reads_the_gradients_of_the_recording() -> None:
    state, expected = new_states("cuda"), new_states("cuda")
    how = dict(factor=scalar(1, "cuda"), rate=scalar(0.01, "cuda", torch.float64))
    sources, tables = new_gradients("cuda", 0), Tables()
    step([source * 1 for source in sources], state, tables, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step([source * 1 for source in sources], state, tables, **how)  # new tensors, as autograd makes them
    for number in range(4):
        how["factor"].fill_(0.0 if number == 2 else 1.0)
        for source, new in zip(sources, new_gradients("cuda", number), strict=True):
            source.copy_(new)
        if number:
            graph.replay()
        step(sources, expected, None, **how)
    torch.testing.assert_close(state[0], expected[0], rtol=1e-5, atol=1e-6)
    for (master, weight), (other_master, other_weight) in zip(state[1], expected[1], strict=True):
        master, other = joined(weight, master), joined(other_weight, other_master)
        torch.testing.assert_close(master, other, rtol=1e-4, atol=1e-4)
