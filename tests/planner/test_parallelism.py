"""The handout's communication_accounting, worked by hand."""

import math
from typing import Any

import pytest

from cs336_systems.planner.parallelism import (
    FeedForward,
    Mesh,
    best_split,
    device_bytes,
    devices_needed,
    forward_seconds,
    least_device_batch,
    parallelism_sections,
)

XXL, V5P = FeedForward(), Mesh()


def test_parameters_state_and_activations_of_xxl() -> None:
    # 16384 x 53248 = 872,415,232; twice that 1,744,830,464 a block; times 126: 219,848,638,464.
    assert XXL.parameters == 219_848_638_464
    # 16 bytes each: 3,517.6 GB, of H100 with 80 GB 43.97.
    assert XXL.state_bytes == 3_517_578_215_424
    assert XXL.state_bytes / 80e9 == pytest.approx(43.97, abs=0.005)
    # (16384 + 53248) x 2 bytes x 126 = 17,547,264 a token.
    assert XXL.activation_bytes == 17_547_264


def test_devices_for_95_gb() -> None:
    # Without activations 3517.578 / 95 = 37.03: 38. With 4096 tokens A / 2 = 35.937 GB:
    # (3517.578 + 35.937) / (95 - 35.937) = 60.16: 61. At 10828 tokens A / 2 is 95.001 GB: never.
    assert devices_needed(XXL, 0, 95e9) == 38
    assert devices_needed(XXL, 4096, 95e9) == 61
    assert devices_needed(XXL, 10_828, 95e9) is None
    assert device_bytes(XXL, 4096, 61) < 95e9 <= device_bytes(XXL, 4096, 60)


def test_below_means_below() -> None:
    tiny = FeedForward(d_model=1, d_ff=1, num_blocks=1)  # 2 parameters, 32 bytes
    assert devices_needed(tiny, 0, 16.0) == 3  # with 2 it is exactly 16


def test_the_forward_pass_is_bound_by_products_from_319_tokens_a_device() -> None:
    # alpha = 4.6e14 / 1.8e11 = 2555.56; / (4 x 2) = 319.44 tokens a device, x 64 = 20,444.
    assert least_device_batch(XXL, V5P) == pytest.approx(319.444, abs=1e-3)


def test_the_bound_is_where_the_times_meet() -> None:
    batch = 64 * least_device_batch(XXL, V5P)
    math_s, fsdp_s, tensor_s = forward_seconds(XXL, V5P, batch)
    assert math_s == pytest.approx(max(fsdp_s, tensor_s))


def test_the_times_by_hand() -> None:
    # D F = 872,415,232. T_math = 4 x 64000 x D F / (64 x 4.6e14) = 7.5861 ms. T_FSDP = 4 D F / (4 x 1.8e11 x 2) =
    # 2.42338 ms. T_TP = 4 x 64000 x 16384 / (16 x 1.8e11 x 1) = 1.45636 ms.
    assert [1e3 * t for t in forward_seconds(XXL, V5P, 64_000)] == pytest.approx([7.5861, 2.42338, 1.45636], rel=1e-4)


def test_one_device_along_a_dimension_sends_nothing_along_it() -> None:
    assert forward_seconds(XXL, Mesh(x=1, y=4), 1)[1] == 0
    assert forward_seconds(XXL, Mesh(x=4, y=1), 1)[2] == 0
    assert least_device_batch(XXL, Mesh(x=1, y=1)) == 0
    # FSDP alone: alpha / M_X = 1277.8 a device.
    assert least_device_batch(XXL, Mesh(x=64, y=1)) == pytest.approx(1277.78, abs=0.01)


@pytest.mark.parametrize(
    "x, y, limit",
    [(1, 1, "one device sends nothing"), (1, 4, "weights are not gathered"), (64, 1, "FSDP"), (64, 20, "FSDP"),
     (64, 64, "tensor parallelism, as T_TP exceeds T_math for any B; Y may be at most F M_Y / alpha = 20.8")],
)  # fmt: skip
def test_the_section_has_the_bound_and_says_what_limits_it(x: int, y: int, limit: str) -> None:
    mesh = Mesh(x=x, y=y)
    section = parallelism_sections(XXL, mesh)[-1]
    least = least_device_batch(XXL, mesh)
    assert (section.value("B / N, overlapped"), section.value("B, overlapped")) == (least, least * x * y)
    # alpha Y / F = 2555.56 Y / 53248.
    assert section.value("T_TP / T_math") == pytest.approx(0.047994 * y if y > 1 else 0, rel=1e-4)
    assert limit in section.notes[1]


def test_too_much_tensor_parallelism_is_never_bound_by_products() -> None:
    # Y < F / alpha = 20.84.
    assert math.isfinite(least_device_batch(XXL, Mesh(y=20)))
    assert math.isinf(least_device_batch(XXL, Mesh(y=21)))


def test_the_best_split_is_where_brute_force_finds_it() -> None:
    # N = 4096, B = 2^20: sqrt(B N M_X / (F M_Y)) = sqrt(2^20 x 4096 x 2 / 53248) = 401.6.
    batch, mesh = 2.0**20, Mesh(x=64, y=64)
    best = best_split(XXL, mesh, batch)
    assert best == pytest.approx(401.65, abs=0.1)

    def slowest(x: float) -> float:
        d, f, y, w = XXL.d_model, XXL.d_ff, 4096 / x, mesh.w_ici
        return max(4 * d * f / (y * w * mesh.m_x), 4 * batch * d / (x * w * mesh.m_y))

    assert min((slowest(x), x) for x in range(2, 4096))[1] == round(best)


@pytest.mark.parametrize(
    "cls, given, message",
    [
        (FeedForward, {"d_ff": 0}, "d_ff is 0: it must be at least 1"),
        (Mesh, {"x": 0}, "x is 0: it must be at least 1"),
        (Mesh, {"w_ici": 0.0}, "w_ici is 0.0: it must be at least 1"),
        (Mesh, {"flops": math.inf}, "flops is inf: it must be at least 1 and below 1e30"),
    ],
)
def test_impossible_values_are_named(cls: type, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**given)
