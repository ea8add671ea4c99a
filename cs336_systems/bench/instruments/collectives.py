"""Repeats one collective on all ranks and measures time and bandwidth of a call.

Calls follow one another without a pause, as a strategy's do. A call's time is from the end of the previous call to its
own end, on a GPU by events, so host time shows only if the host is slower than the transfer.
"""

import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel import comm
from ...parallel.failure import named
from ...training.metrics import summarise
from .timing import wait_for

Collective = Callable[[], Any]
_FEWEST_CALLS = 3
# PyTorch 2.13 renamed these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bandwidths(collective: str, world_size: int, nbytes: int, time_ms: float) -> dict[str, float]:
    """Algorithm and bus bandwidth in bytes/s of a call on a buffer of nbytes (NCCL-tests, doc/PERFORMANCE.md).

    The buffer is the larger one: a rank's input to a reduce-scatter, its output of an all-gather. The bus bandwidth
    counts the bytes that a link carries, so that it compares with a link's bandwidth for any number of ranks.
    """
    algorithm, share = nbytes / (time_ms / 1e3), (world_size - 1) / world_size
    on_link = {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": share, "broadcast": 1.0}[collective]
    return {"algorithm_bytes_per_s": algorithm, "bus_bytes_per_s": algorithm * on_link}


def prepare(collective: str, nbytes: int, device: torch.device) -> tuple[Collective, Tensor, Tensor]:
    """A call of the collective on float32 numbers, its larger buffer, and the rank's input.

    The buffer has nbytes, or a few more so that they divide evenly.
    """
    n, numbers = comm.world_size(), -(-nbytes // 4)
    divides = collective in ("reduce-scatter", "all-gather")
    piece = torch.empty(-(-numbers // n) if divides else 0, device=device)
    whole = torch.empty(len(piece) * n if divides else numbers, device=device)
    call, given = {
        "all-reduce": (lambda: dist.all_reduce(whole), whole),
        "reduce-scatter": (lambda: _reduce_scatter(piece, whole), whole),
        "all-gather": (lambda: _all_gather(whole, piece), piece),
        "broadcast": (lambda: dist.broadcast(whole, 0), whole),
    }[collective]
    return call, whole, given


def refill(given: Tensor) -> None:
    """Fill with tiny random numbers, because an all-reduce sums its own results, which grow with each call."""
    given.uniform_(1, 2).mul_(2.0**-126)


def most_calls(collective: str, world_size: int) -> int:
    """How many calls may follow a `refill` before its numbers are too large for float32."""
    return int(250 / math.log2(world_size)) if collective == "all-reduce" else sys.maxsize


def time_calls(call: Collective, given: Tensor, count: int) -> list[float]:
    """The times in ms of consecutive calls, after an untimed one in which ranks may wait for each other."""
    device = given.device
    refill(given)
    comm.barrier("start of the calls")
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for event in events:
            call()
            event.record()
        wait_for(device)
        return [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
    ends = []
    for _ in range(count + 1):
        call()
        ends.append(time.perf_counter())
    return [(end - begin) * 1e3 for begin, end in itertools.pairwise(ends)]


def affordable(call_ms: float, warmup: int, calls: int, budget_s: float) -> tuple[int, int]:
    """Numbers of warm-up calls (a quarter of the budget, at least 1) and measured calls (the rest, at least 3)."""
    most = budget_s * 1e3 / max(call_ms, 1e-3)
    return max(1, min(warmup, int(most / 4))), max(_FEWEST_CALLS, min(calls, int(most * 3 / 4)))


def measure_collective(
    collective: str, nbytes: int, device: torch.device, warmup: int, calls: int, budget_s: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration as it ran and its metrics, the same on all ranks; see `affordable` for the number of calls."""
    with named(f"{collective} of {nbytes} bytes"):
        call, buffer, given = prepare(collective, nbytes, device)
        estimate = max(comm.all_gather_objects(time_calls(call, given, 1)[0], "the time of one call"))
        most = most_calls(collective, comm.world_size()) - 1
        warmup, calls = affordable(estimate, min(warmup, most), min(calls, most), budget_s)
        time_calls(call, given, warmup)
        times = time_calls(call, given, calls)
    metrics = of_ranks(comm.all_gather_objects(times, "times of the calls"))
    metrics |= bandwidths(collective, comm.world_size(), buffer.nbytes, metrics["time_ms"]["p50"])
    backend = dict(each.split(":") for each in dist.get_backend_config().split(","))[device.type]
    exact = collective in ("all-reduce", "broadcast")
    ran = {"collective": collective, "bytes": buffer.nbytes if exact else nbytes, "buffer_bytes": buffer.nbytes}
    return ran | {"world_size": comm.world_size(), "backend": backend, "dtype": "float32"}, metrics


def of_ranks(times: list[list[float]]) -> dict[str, Any]:
    """Combine the ranks: the times of the rank with the longest median, and the spread of the medians."""
    summaries = [summarise(each) for each in times]
    medians = [summary["p50"] for summary in summaries]
    slowest = medians.index(max(medians))
    return {
        "time_ms": summaries[slowest],
        "times_ms": times[slowest],
        "calls": len(times[slowest]),
        "slowest_rank": slowest,
        "ranks_ms": medians,
        "spread_ms": max(medians) - min(medians),
    }
