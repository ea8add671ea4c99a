"""The calculations of the 2026 handout, by hand and beside a layer that is really divided over devices."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.planner.communication import ring_seconds
from cs336_systems.planner.scaling import (
    Layer,
    both_section,
    data_parallel_seconds,
    data_parallel_section,
    device_flops,
    fsdp_seconds,
    most_fsdp,
    most_of_both,
    most_tensor_parallel,
    scaling_sections,
    tensor_parallel_seconds,
)

# p = B W / C = 4, q = 3 F W / (2 C) = 6.
SMALL = Layer(batch=8, d_model=4, d_ff=8, flops=2.0, egress=1.0, n_fsdp=2, n_tp=2)


def test_values_by_hand() -> None:
    # 12 x 8 x 4 x 8 / 2 = 1536 operations; three matrices of 2 x 4 x 8 = 64 bytes, 192; y of 2 x 8 x 4 = 64 bytes.
    assert device_flops(SMALL, "backward", 2) == 1536
    assert device_flops(SMALL, "forward", 4) == 384
    assert data_parallel_seconds(SMALL, 4) == 2 * 3 / 4 * 192
    assert fsdp_seconds(SMALL, "forward", 4) == 3 / 4 * 192
    assert fsdp_seconds(SMALL, "backward", 4, n_tp=2) == 2 * 3 / 4 * 192 / 2
    assert tensor_parallel_seconds(SMALL, 4, n_fsdp=2) == 2 * 3 / 4 * 64 / 2
    assert most_fsdp(SMALL) == 5
    assert most_tensor_parallel(SMALL, "forward") == 7
    assert most_tensor_parallel(SMALL, "backward") == 13
    assert most_of_both(SMALL, together=True) == (5, 7)
    # 24 (1 + 1/4 + 1/6)^2 / 4 = 6 x (17/12)^2 = 12.04.
    n_fsdp, n_tp = most_of_both(SMALL, together=False)
    assert n_fsdp * n_tp == pytest.approx(6 * (17 / 12) ** 2)


@pytest.mark.parametrize("batch, d_ff, flops", list(itertools.product((64, 4096), (256, 8192), (1e3, 3e5))))
def test_bounds_are_where_the_times_meet(batch: int, d_ff: int, flops: float) -> None:
    layer = Layer(batch=batch, d_model=128, d_ff=d_ff, flops=flops, egress=100.0)

    def meet(compute_s: float, communication_s: float) -> None:
        assert communication_s == pytest.approx(compute_s)

    n: Any = most_fsdp(layer)
    meet(device_flops(layer, "backward", n) / flops, data_parallel_seconds(layer, n))
    for direction in ("forward", "backward"):
        meet(device_flops(layer, direction, n) / flops, fsdp_seconds(layer, direction, n))
        m: Any = most_tensor_parallel(layer, direction)
        meet(device_flops(layer, direction, m) / flops, tensor_parallel_seconds(layer, m))


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("batch, d_ff", [(64, 64), (4096, 256), (256, 16384), (2, 4096), (4096, 2)])
def test_no_division_over_more_devices_is_bound_by_products(batch: int, d_ff: int, together: bool) -> None:
    layer = Layer(batch=batch, d_model=128, d_ff=d_ff, flops=1e4, egress=1e3)

    def is_bound_by_products(n_fsdp: float, n_tp: float) -> bool:
        fsdp, tensor = fsdp_seconds(layer, "forward", n_fsdp, n_tp), tensor_parallel_seconds(layer, n_tp, n_fsdp)  # type: ignore[arg-type]
        sent = max(fsdp, tensor) if together else fsdp + tensor
        return sent <= device_flops(layer, "forward", n_fsdp * n_tp) / layer.flops * (1 + 1e-9)  # type: ignore[arg-type]

    n_fsdp, n_tp = most_of_both(layer, together)
    assert is_bound_by_products(n_fsdp, n_tp)
    axis = [1.02**i for i in range(600)]
    for other_fsdp in axis:
        least = 1.001 * n_fsdp * n_tp / other_fsdp  # more devices than those, with so many along FSDP's axis
        assert least < 1 or not is_bound_by_products(other_fsdp, least)


def layer_of(seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((12, 8), (8, 16), (8, 16), (16, 8), (12, 8))
    x, w1, w2, w3, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, [w1, w2, w3], dy


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_equations_of_tensor_parallelism_are_those_of_autograd(devices: int) -> None:
    """As the write-up's tp_calcs has them, with f = silu; and their operations are those that are counted."""
    x, (w1, w2, w3), dy = layer_of()
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w1, w2, w3)]
    y = (silu(leaves[0] @ leaves[1]) * (leaves[0] @ leaves[2])) @ leaves[3]
    expected = torch.autograd.grad(y, leaves, dy)

    dx, gradients = torch.zeros_like(x), []
    layer = Layer(batch=12, d_model=8, d_ff=16, n_fsdp=1, n_tp=devices)
    for v1, v2, v3 in zip(w1.chunk(devices, 1), w2.chunk(devices, 1), w3.chunk(devices, 0), strict=True):
        with FlopCounterMode(display=False) as forward:
            x1, x2 = x @ v1, x @ v2
            f = silu(x1)
            _ = (z := f * x2) @ v3
        with FlopCounterMode(display=False) as backward:
            dz = dy @ v3.T
            slope = torch.sigmoid(x1) * (1 + x1 * (1 - torch.sigmoid(x1)))
            dx2, dx1 = dz * f, dz * slope * x2
            gradients.append((x.T @ dx1, x.T @ dx2, z.T @ dy))
            dx += dx1 @ v1.T + dx2 @ v2.T  # the all-reduce
        assert forward.get_total_flops() == device_flops(layer, "forward", devices)
        assert backward.get_total_flops() == device_flops(layer, "backward", devices)
    torch.testing.assert_close(dx, expected[0])
    for i, dim in enumerate((1, 1, 0)):
        torch.testing.assert_close(torch.cat([each[i] for each in gradients], dim), expected[1 + i])


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_the_alternate_ring_sends_whole_tensors(devices: int) -> None:
    """Done step by step: all have the sum, and a device has sent (N - 1) S bytes."""
    tensors = [torch.full((6,), 10.0**i) for i in range(devices)]
    sums, passed, sent = [t.clone() for t in tensors], list(tensors), 0
    for _ in range(devices - 1):
        passed = [passed[(i - 1) % devices] for i in range(devices)]  # from the device to the left
        sent += passed[0].nbytes
        sums = [mine + theirs for mine, theirs in zip(sums, passed, strict=True)]
    assert all(torch.equal(mine, torch.stack(tensors).sum(0)) for mine in sums)
    assert ring_seconds("alternate all-reduce", tensors[0].nbytes, devices, 0, 1.0) == sent
    usual = ring_seconds("all-reduce", tensors[0].nbytes, devices, 0, 1.0)
    assert sent == pytest.approx(devices / 2 * usual)


@pytest.mark.parametrize("batch, flops, egress", [(1, 1e29, 1.0), (1, 1.0, 1e29), (1 << 39, 1e29, 1e29)])
def test_extremes_are_numbers(batch: int, flops: float, egress: float) -> None:
    layer = Layer(batch=batch, flops=flops, egress=egress)
    assert all(math.isfinite(term.value) for section in scaling_sections(layer) for term in section.terms)


def test_where_one_axis_is_all_there_is_the_working_says_so() -> None:
    section = both_section(Layer(batch=1))
    (term,) = (term for term in section.terms if term.name == "at most, in turns")
    assert term.working.startswith("N <= 1 + q, at N_FSDP = 1.0")
    assert term.value == 1 + section.value("q")


def test_the_sections_say_the_same() -> None:
    ring, data, fsdp, tensor, both = scaling_sections(SMALL)
    assert ring.value("alternate all-reduce") == 3 * 192
    assert data.value("at most") == fsdp.value("at most, in both") == 5
    assert tensor.value("backward, at most") == 13
    assert both.value("communication") == max(both.value("FSDP axis"), both.value("TP axis")) == 48
    assert both_section(SMALL).value("at most, overlapped") == 35


def test_both_times_and_which_is_longer_at_the_devices_that_are_given() -> None:
    # 12 x 8 x 4 x 8 / 4 = 768 operations at 2 a second: 384 s; 2 x 3 / 4 x 192 = 288 bytes at 1 a second.
    _, data, fsdp, tensor, both = scaling_sections(SMALL)
    assert (data.value("backward, computing"), data.value("backward, communication")) == (384, 288)
    assert fsdp.value("forward, computing") == both.value("forward, computing") == 192
    assert (fsdp.value("forward, communication"), fsdp.value("backward, communication")) == (144, 288)
    assert all(note.endswith(": hidden") for note in (*data.notes, *fsdp.notes, *tensor.notes[:2]))
    # The TP axis sends 2 x 1 / 2 x 64 / 2 = 32 bytes, FSDP's 1 / 2 x 192 / 2 = 48.
    assert ["48,000.000 ms" in both.notes[0], "80,000.000 ms" in both.notes[1]] == [True, True]
    # One more than the five of FSDP, and the communication is longer.
    for devices, end in ((5, ": hidden"), (6, ": too long to be hidden, by 64,000.000 ms")):
        layer = replace(SMALL, n_fsdp=devices, n_tp=1)  # of 6: 2 x 5 / 6 x 192 = 320 bytes, 3072 / 6 / 2 = 256 s
        assert data_parallel_section(layer).notes[0].endswith(end)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(batch=0), "batch is 0: it must be at least 1"),
        (dict(n_tp=-1), "n_tp is -1"),
        (dict(flops=0.0), "flops is 0.0: it must be at least 1 and below 1e30"),
        (dict(flops=1e35), "flops is 1e.35"),
        (dict(egress=float("inf")), "egress is inf"),
        (dict(d_ff=1.5), "d_ff is 1.5"),
    ],
    ids=str,
)
def test_an_impossible_layer_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Layer(**fields)
