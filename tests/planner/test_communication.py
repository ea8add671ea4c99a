"""Collectives, strategies' transfers and the best bucket: by hand and by brute force."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cs336_systems.config.model import ModelConfig
from cs336_systems.planner.accounting import matmul_parameters, num_parameters
from cs336_systems.planner.cards import CARDS, MEASURED_ALL_REDUCE, fit_transfer, get_card
from cs336_systems.planner.communication import (
    added_seconds,
    best_num_buckets,
    collective_seconds,
    collective_section,
    num_calls,
    overhead_sections,
    ring_seconds,
    sent,
)
from cs336_systems.planner.job import Job
from cs336_systems.planner.rows import measured_overheads, overheads_beside, transfer_points

XL = ModelConfig(size="xl", context_length=512).shape


def row(case: str, variant: str = "", config: dict[str, Any] | None = None, **metrics: Any) -> Any:
    return SimpleNamespace(case=case, variant=variant, config=config or {}, status="ok", metrics=metrics, env={})


@pytest.mark.parametrize(
    "kind, expected",
    # 4 ranks, alpha 1 us, 1e9 bytes at 1e11 bytes/s: 3 (1e-6 + 1e9 / (4 x 1e11)) = 7.503 ms, all-reduce twice that.
    [("all-gather", 7.503e-3), ("reduce-scatter", 7.503e-3), ("all-reduce", 15.006e-3)],
)
def test_ring_collectives_by_hand(kind: str, expected: float) -> None:
    assert ring_seconds(kind, 1e9, 4, 1e-6, 1e11) == pytest.approx(expected)
    assert ring_seconds(kind, 1e9, 1, 1e-6, 1e11) == 0


def test_a_collective_costs_half_a_call_a_step_and_at_most_a_call() -> None:
    # o 30 us and 1e11 bytes/s. Of 1e6 bytes a gather over 2, 3, 4 and 8 takes 15, 30, 30, 30 us and 5, 6.67, 7.5, 8.75.
    card = get_card("H200", latency_s=30e-6, link=1e11)
    expected = {1: 0, 2: 20e-6, 3: 36.667e-6, 4: 37.5e-6, 8: 38.75e-6}
    for kind in ("all-gather", "reduce-scatter"):
        for w, seconds in expected.items():
            assert collective_seconds(kind, 1e6, w, card) == pytest.approx(seconds, rel=1e-4)
    assert collective_seconds("all-reduce", 1e6, 2, card) == pytest.approx(40e-6)
    assert collective_seconds("all-reduce", 1e6, 8, card) == pytest.approx(47.5e-6)  # 30 and twice 8.75
    assert collective_seconds("all-reduce", 1e6, 1, card) == 0


def test_the_section_of_collectives_has_the_values_of_its_letters() -> None:
    card = get_card("H200", latency_s=30e-6, link=1e11)
    section = collective_section(1e9, 4, card)
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        assert section.value(kind) == collective_seconds(kind, 1e9, 4, card)
    working = {term.name: term.working for term in section.terms}
    # 1e9 / (4 x 1e11) = 2.5 ms.
    assert working["all-gather"].endswith("= 0.03 ms + 3 x 2.5 ms")
    assert working["all-reduce"].endswith("= 0.03 ms + 6 x 2.5 ms")
    assert working["alternate all-reduce"].endswith("= 3 x (0.015 ms + 10 ms)")
    assert section.value("alternate all-reduce") == pytest.approx(3 * 10.015e-3)
    assert section.value("beta, a link") == 1e11


@pytest.mark.parametrize("nbytes", [0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
def test_a_gather_takes_no_longer_than_an_all_reduce(world_size: int, nbytes: float) -> None:
    card = CARDS["H200"]
    longest = collective_seconds("all-reduce", nbytes, world_size, card)
    for kind in ("all-gather", "reduce-scatter"):
        assert collective_seconds(kind, nbytes, world_size, card) <= longest


def test_a_fit_finds_overhead_and_bandwidth_again() -> None:
    sizes = [1e5, 1e6, 1e7, 1e9]
    assert fit_transfer(sizes, [2e-5 + x / 3e11 for x in sizes]) == pytest.approx((2e-5, 3e11))


def test_the_fit_is_the_least_of_the_relative_errors() -> None:
    sizes, seconds = zip(*MEASURED_ALL_REDUCE, strict=True)
    o, w = fit_transfer(sizes, seconds)

    def squares(o: float, w: float) -> float:
        return sum(((o + x / w) / t - 1) ** 2 for x, t in MEASURED_ALL_REDUCE)

    for factor in (0.99, 1.01):
        assert squares(o, w) < squares(o * factor, w)
        assert squares(o, w) < squares(o, w * factor)


@pytest.mark.parametrize("sizes, seconds", [([1e6], [1e-3]), ([1e6, 1e6], [1e-3, 2e-3]), ([1e6, 1e7], [2e-3, 1e-3])])
def test_a_fit_needs_times_that_grow(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="all-reduce times"):
        fit_transfer(sizes, seconds)


def test_time_added_by_buckets_by_hand() -> None:
    # 8e9 bytes at 2e11 bytes/s are 40 ms; 20 buckets: 2 ms of the last one and 20 x 0.05 ms.
    assert added_seconds(8e9, 2e11, 5e-5, 20) == pytest.approx(3e-3)
    # One bucket: all of it is exposed.
    assert added_seconds(8e9, 2e11, 5e-5, 1) == pytest.approx(40.05e-3)


def test_the_timeline_of_the_model() -> None:
    # Step by step, instead of the formula: a bucket's gradients take t to compute and t + o to send, one at a time.
    nbytes, w, o, n = 8e9, 2e11, 5e-5, 20
    t = nbytes / n / w
    computed = sending_ends = 0.0
    for _ in range(n):
        computed += t
        sending_ends = max(sending_ends, computed) + t + o
    assert sending_ends - computed == pytest.approx(added_seconds(nbytes, w, o, n))


def test_the_best_number_of_buckets_is_that_of_brute_force() -> None:
    # sqrt(8e9 / (2e11 x 5e-5)) = 28.28: 28 buckets.
    best = best_num_buckets(8e9, 2e11, 5e-5)
    assert best == pytest.approx(28.284, abs=1e-3)
    assert min(range(1, 1000), key=lambda n: added_seconds(8e9, 2e11, 5e-5, n)) == 28
    assert added_seconds(8e9, 2e11, 5e-5, best) == pytest.approx(2 * math.sqrt(8e9 * 5e-5 / 2e11))
    optimum = overhead_sections(8e9, 2e11, 5e-5)[1]
    assert optimum.value("bytes a bucket") == pytest.approx(math.sqrt(8e9 * 2e11 * 5e-5))


def test_limits_of_the_best_number() -> None:
    assert best_num_buckets(8e9, 2e11, 0) == math.inf  # nothing speaks against one more
    assert best_num_buckets(1e3, 2e11, 5e-5) == 1  # fewer there are not
    assert overhead_sections(8e9, 2e11, 0)[1].value("added") == 0


@pytest.mark.parametrize(
    "strategy, size, calls",
    # 4 + 3 matrices and 2 norms a block, embedding, last norm, head; and all of them in one bucket.
    [("naive", None, 48 * 9 + 3), ("overlap", None, 48 * 9 + 3), ("flat", None, 1), ("bucketed", 1e6, 1)],
)
def test_all_reduces_of_a_step(strategy: str, size: float | None, calls: int) -> None:
    assert num_calls(Job(shape=XL, strategy=strategy, world_size=2, bucket_size_mb=size)) == calls


def test_all_reduces_in_buckets() -> None:
    # In MiB, backwards: head 61.04, last norm 0.01, and 48 times: 3 of 39.06, 0.01, 4 of 9.77, 0.01; embedding 61.04.
    # Buckets of 40: head | norm, w3 | w2 | w1, ln2 | o, v, k, q, ln1 | w3 | ... | embedding: 4 a block and 2 more.
    for strategy in ("bucketed", "overlap"):
        assert num_calls(Job(shape=XL, strategy=strategy, world_size=2, bucket_size_mb=40.0)) == 48 * 4 + 2
        # In bfloat16 all of them are half as large.
        narrow = Job(shape=XL, strategy=strategy, world_size=2, bucket_size_mb=20.0, weight_dtype="bf16")
        assert num_calls(narrow) == 48 * 4 + 2


def test_each_type_of_gradients_has_its_buckets() -> None:
    job = Job(shape=XL, strategy="overlap", world_size=2, fused=True)
    assert num_calls(job) == 48 * 9 + 3
    assert num_calls(replace(job, strategy="flat")) == 2
    assert num_calls(replace(job, strategy="flat", precision="fp32")) == 1
    # Matrices fill buckets of half the size as they do in bfloat16, but beside them there is one of float32 norms,
    # 0.6 MiB, and one of the embedding, 61 MiB.
    narrow = Job(shape=XL, strategy="overlap", world_size=2, bucket_size_mb=20.0, weight_dtype="bf16")
    assert num_calls(replace(job, bucket_size_mb=20.0)) == num_calls(narrow) - 1 + 2


def test_transfers_of_a_step_by_hand() -> None:
    n, card = num_parameters(XL), CARDS["H200"]
    masters, matrices = Job(shape=XL, strategy="flat", world_size=2, fused=True), matmul_parameters(XL)
    assert sent(masters, card).bytes_a_gpu == 2 * matrices + 4 * (n - matrices)
    assert sent(masters, card).working.startswith("2 x (2 N_m + 4 (N - N_m)) (w - 1) / w = 2 x (2 x 1,982,080,000 + ")
    assert sent(replace(masters, grad_dtype="fp32"), card).bytes_a_gpu == 4 * n
    assert sent(replace(masters, grad_dtype="bf16"), card).bytes_a_gpu == 2 * n
    for w in (2, 4, 8):
        ddp = sent(Job(shape=XL, strategy="flat", world_size=w), card)
        assert ddp.bytes_a_gpu == 2 * (w - 1) / w * 4 * n
        assert ddp.seconds == pytest.approx(2 * (w - 1) / w * 4 * n / card.link)
        fsdp = sent(Job(shape=XL, strategy="fsdp", world_size=w), card)
        assert fsdp.bytes_a_gpu == pytest.approx(3 * (w - 1) / w * 2 * n)
        once = sent(Job(shape=XL, strategy="fsdp", world_size=w, reshard_after_forward=False), card)
        assert (once.bytes_a_gpu, once.calls) == (pytest.approx(fsdp.bytes_a_gpu * 2 / 3), fsdp.calls * 2 / 3)
        assert once.seconds == pytest.approx(fsdp.seconds * 2 / 3)
        assert once.working.startswith("2 x 2 N (w - 1) / w")
        wide = sent(Job(shape=XL, strategy="fsdp", world_size=w, reshard_after_forward=False, grad_dtype="fp32"), card)
        assert (wide.bytes_a_gpu, wide.calls) == (pytest.approx(once.bytes_a_gpu * 3 / 2), once.calls)
        assert wide.last_seconds == 2 * once.last_seconds
    halved = sent(Job(shape=XL, strategy="flat", world_size=2, grad_dtype="bf16"), card)
    assert halved.bytes_a_gpu == 2 * n
    narrow = Job(shape=XL, strategy="flat", world_size=2, weight_dtype="bf16")
    assert sent(narrow, card).bytes_a_gpu == 2 * n
    assert sent(narrow, card).working.startswith("2 x 2 N (w - 1) / w")
    assert sent(replace(narrow, grad_dtype="fp32"), card).bytes_a_gpu == 4 * n
    # Two GPUs: the all-reduce that o and w were fitted to.
    one = sent(Job(shape=XL, strategy="flat", world_size=2), card)
    assert one.seconds + one.overhead_s == pytest.approx(card.latency_s + 4 * n / card.link)


def test_the_points_of_a_row_file_are_those_of_the_world_size_and_of_nccl() -> None:
    measured = ((1e6, 2, "nccl", 0.05), (1e9, 2, "nccl", 4.0), (1e6, 4, "nccl", 9.0), (1e6, 2, "gloo", 7.0))
    rows = [
        row("all-reduce", config=dict(bytes=size, world_size=w, backend=backend), time_ms={"p50": ms})
        for size, w, backend, ms in measured
    ]
    assert transfer_points(rows, 2) == ([1e6, 1e9], [5e-5, 4e-3])
    with pytest.raises(ValueError, match="world_size is 8: the row file has no all-reduce"):
        transfer_points(rows, 8)


def test_overheads_are_against_the_same_step_alone() -> None:
    times = {"alone": 100.0, "bucketed:10": 130.0, "alone compiled": 60.0, "bucketed:25 compiled": 65.0,
             "alone+graph compiled": 50.0, "bucketed:100+graph compiled": 58.0, "bucketed:100+zero1": 1.0,
             "overlap": 1.0, "bucketed:5+graph": 1.0}  # fmt: skip
    rows = [row("ddp", variant, step_ms={"p50": ms}) for variant, ms in times.items()]
    assert measured_overheads(rows) == [
        ("eager", 10 * 2**20, pytest.approx(0.030)),
        ("compiled", 25 * 2**20, pytest.approx(0.005)),
        ("compiled CUDA graph", 100 * 2**20, pytest.approx(0.008)),
    ]


def steps(devices: int, size: str = "xl") -> list[Any]:
    config = {"run": {"model": {"size": size}}, "devices": devices}
    times = {"alone": 100.0, "bucketed:10": 130.0, "bucketed:25": 120.0}
    return [row("ddp", variant, config, step_ms={"p50": ms}) for variant, ms in times.items()]


def test_overheads_of_16_bit_gradients_are_beside_16_bit_gradients() -> None:
    rows = steps(2)
    for each in rows:
        each.config["run"] |= {"train": {"precision": "bf16"}, "optimizer": {"implementation": "fused"}}
    with pytest.raises(ValueError, match=r"it has 3 rows of ddp of 4\.029 GB on 2 GPUs"):
        overheads_beside(rows, 4.0 * num_parameters(XL), 2)
    n, matrices = num_parameters(XL), matmul_parameters(XL)
    assert len(overheads_beside(rows, 4.0 * n - 2 * matrices, 2)[0]) == 2
    for each in rows:  # as in rows from before there were masters
        each.config["run"]["optimizer"]["implementation"] = "torch_fused"
    assert len(overheads_beside(rows, 4.0 * n, 2)[0]) == 2


def test_overheads_of_other_gradients_and_ranks_are_left_out_and_named() -> None:
    nbytes = 4.0 * num_parameters(XL)
    others = [*steps(4), *steps(2, "small"), row("all-reduce", "nccl 2")]
    found, left_out = overheads_beside([*steps(2), *others], nbytes, 2)
    assert [size / 2**20 for _, size, _ in found] == [10, 25]
    # small has 128,625,408 parameters of 4 bytes.
    assert left_out == (
        "left out of the measured rows: 3 rows of ddp of 7.993 GB on 4 GPUs, 3 rows of ddp of 0.5145 GB on 2 GPUs, "
        "1 rows of all-reduce"
    )
    assert overheads_beside(steps(2), nbytes, 2)[1] == ""


@pytest.mark.parametrize(
    "rows, there",
    [
        (steps(2, "2.7B"), "3 rows of ddp of 13.63 GB on 2 GPUs"),
        ([row("kernels")], "1 rows of kernels"),
        (steps(2)[1:], "2 rows of 7.993 GB of gradients on 2 GPUs"),  # nothing to subtract
        ([], "no rows"),
    ],
)
def test_a_file_without_overheads_of_these_gradients_is_refused(rows: list[Any], there: str) -> None:
    message = f"it has {there}: it must have rows of ddp or bucket-size with 7.993 GB of grad"
    with pytest.raises(ValueError, match=re.escape(message)):
        overheads_beside(rows, 4.0 * num_parameters(XL), 2)


def test_cards_by_name_with_other_ceilings() -> None:
    assert get_card("H200", bandwidth=1e12).bandwidth == 1e12
    with pytest.raises(ValueError, match="card is 'H300': it must be one of H200"):
        get_card("H300")
    with pytest.raises(ValueError, match=r"link is -1\.0: it must be above 0"):
        get_card("H200", link=-1.0)
