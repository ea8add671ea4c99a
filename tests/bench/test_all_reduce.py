"""The case `all-reduce`: bandwidths by NCCL-tests' definitions, rows that the planner reads, every collective."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases.all_reduce import CASE
from cs336_systems.bench.instruments.collectives import (
    affordable,
    bandwidths,
    measure_collective,
    most_calls,
    of_ranks,
    refill,
)
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.planner.rows import transfer_points
from tests.bench.conftest import Bench
from tests.distributed import run_ranks


@pytest.mark.parametrize(
    "collective, factor",  # over 4 ranks, as doc/PERFORMANCE.md of NCCL-tests derives them
    [("all-reduce", 1.5), ("reduce-scatter", 0.75), ("all-gather", 0.75), ("broadcast", 1.0)],
)
def test_bandwidths_follow_nccl_tests(collective: str, factor: float) -> None:
    # 10^9 bytes in 4 ms are 250 GB/s.
    found = bandwidths(collective, 4, 10**9, 4.0)
    assert found["algorithm_bytes_per_s"] == pytest.approx(250e9)
    assert found["bus_bytes_per_s"] == pytest.approx(factor * 250e9)


def test_the_rank_with_the_longest_median_counts() -> None:
    found = of_ranks([[1.0, 2.0, 9.0], [3.0, 3.5, 4.0]])
    assert (found["time_ms"]["p50"], found["slowest_rank"], found["calls"]) == (3.5, 1, 3)
    assert found["ranks_ms"] == [2.0, 3.5]
    assert found["spread_ms"] == 1.5


def test_slow_collectives_get_fewer_calls_but_at_least_three() -> None:
    found = [affordable(100.0, 5, 50, budget_s) for budget_s in (0.01, 2.0, 100.0)]
    assert found == [(1, 3), (5, 15), (5, 50)]  # 20 calls fit into 2 s: 5 and 15


@pytest.mark.usefixtures("in_this_process", "ranks_forked")
def test_the_quick_command_measures_every_collective_for_the_planner(tmp_path: Path, bench: Bench) -> None:
    code, said, _ = bench("all-reduce", "--quick", "--out", str(tmp_path))
    assert code == 0
    rows = read_rows(tmp_path / "all-reduce.jsonl")
    assert [row.error for row in rows] == [None] * 8
    assert {(row.config["collective"], row.config["bytes"]) for row in rows} == {
        (name, size) for name in ("all-reduce", "reduce-scatter", "all-gather", "broadcast") for size in (10**4, 10**6)
    }
    for row in rows:
        assert (row.config["backend"], row.config["world_size"]) == ("gloo", 2)
        assert len(row.metrics["ranks_ms"]) == 2
        assert row.metrics["time_ms"]["p50"] == max(row.metrics["ranks_ms"])
    sizes, seconds = transfer_points(rows, 2)  # only the all-reduces
    assert sizes == [10**4, 10**6]
    assert seconds == [row.metrics["time_ms"]["p50"] / 1e3 for row in rows if row.config["collective"] == "all-reduce"]
    for name in ("all-reduce.md", "all-reduce-time.png", "all-reduce-bandwidth.png"):
        assert (tmp_path / name).is_file()
    assert "| broadcast | 1 MB |" in said


@pytest.mark.parametrize("world_size", [2, 3, 6, 8, 1024])
def test_an_all_reduce_of_its_own_results_stays_within_float32(world_size: int) -> None:
    given = torch.empty(1000)
    refill(given)
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    assert tiny <= given.min()
    assert len(given.unique()) > 900
    calls = most_calls("all-reduce", world_size)
    assert (
        given.max().item() * world_size**calls < largest < 16 * world_size**2 * world_size**calls * given.max().item()
    )


def what_ran(collective: str, nbytes: int) -> dict[str, Any]:
    return measure_collective(collective, nbytes, torch.device("cpu"), 1, 3, 0.1)[0]


def test_a_size_that_does_not_divide_evenly_is_rounded_up() -> None:
    # 250 numbers of 4 bytes over 3 ranks: 84 each.
    for ran in run_ranks(what_ran, 3, "all-gather", 1000):
        assert (ran["bytes"], ran["buffer_bytes"], ran["world_size"]) == (1000, 3 * 84 * 4, 3)


def test_nccl_needs_a_gpu_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from cs336_systems.bench.cases import all_reduce

    monkeypatch.setattr(all_reduce, "gpu_count", lambda: 4)
    monkeypatch.setattr(all_reduce.os, "cpu_count", lambda: 2)
    found = {(config.backend, config.world_size) for config in configurations(CASE)}
    assert found == {("nccl", 2), ("nccl", 4), ("gloo", 2), ("gloo", 4), ("gloo", 6)}
    with pytest.raises(ValueError, match=r"world_size is 8: it must be at most 6 here with backend 'gloo', 2 cores"):
        configurations(CASE, {"world_size": (2, 8)})
    monkeypatch.setattr(all_reduce, "gpu_count", lambda: 0)
    for backends in (("nccl",), ("gloo", "nccl")):
        with pytest.raises(ValueError, match=r"world_size is 2: it must be at most 0 here with backend 'nccl'"):
            configurations(CASE, {"backend": backends})


@pytest.mark.multigpu
def test_nccl_runs_every_collective() -> None:
    configs = configurations(CASE, {"backend": ("nccl",), "world_size": (2,), "calls": (20,)}, quick=True)
    rows: list[Row] = list(CASE.measure(configs))
    assert [row.error for row in rows] == [None] * 8
    assert {row.config["backend"] for row in rows} == {"nccl"}
    large = [row for row in rows if row.config["bytes"] == 10**6]
    assert all(0 < row.metrics["time_ms"]["p50"] < 50 for row in large)
