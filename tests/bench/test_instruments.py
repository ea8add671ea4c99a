"""The instruments: clocks, and streams and gathers in synthetic traces whose every microsecond is known."""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.bench.instruments import timing
from cs336_systems.bench.instruments.gathers import gathers_of
from cs336_systems.bench.instruments.streams import Piece, by_name, cpu_pieces, gpu_pieces, streams_of, totals
from cs336_systems.bench.instruments.timing import Stopwatch, time_ms
from cs336_systems.bench.instruments.trace import gpu_events, length, merge, overlap
from tests.profiling.gpu_trace import BACKWARD, COPY, MAIN, MUL, SGEMM, Trace, training_steps

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FROM_PEER, OWN_PART = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"


def event(name: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    """An operator of a CPU."""
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "pid": 1, "tid": thread}


def test_touching_spans_are_merged() -> None:
    assert merge([(3, 4), (0, 1), (1, 2), (1.5, 1.8)]) == [(0, 2), (3, 4)]
    assert merge([(0, 1), (1.2, 2)], gap=0.3) == [(0, 2)]
    assert length([(0, 2), (3, 4)]) == 3


def test_overlap_is_the_length_of_the_intersection() -> None:
    assert overlap([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == 1 + 1 + 1
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([], [(1, 2)]) == 0


@pytest.mark.parametrize("transfer", [ALL_REDUCE, FROM_PEER])
def test_nccl_kernels_and_copies_between_gpus_are_communication(transfer: str) -> None:
    kernels = [("gemm", 1000.0, 2000.0), (transfer, 2000.0, 4000.0), ("add", 2500.0, 1500.0)]
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels]
    found = gpu_pieces(events)
    assert streams_of(found) == {"compute": [(0.0, 3.0)], "communication": [(1.0, 5.0)]}
    assert by_name(found) == {
        "names": ["gemm", transfer, "add"],
        "pieces": {"compute": [[0, 0.0, 2.0], [2, 1.5, 3.0]], "communication": [[1, 1.0, 5.0]]},
    }


def test_half_of_the_communication_is_overlapped() -> None:
    found = totals({"compute": [(0, 3)], "communication": [(1, 5)]})
    assert list(found.values()) == [5, 3, 4, 2, 0.5]
    assert totals({"compute": [(0, 3)], "communication": []})["overlapped"] is None


def test_on_a_cpu_operators_compute_and_gloos_threads_communicate() -> None:
    events = [event("aten::linear", 0, 10), event("aten::mm", 1, 8), event("autograd::engine", 10, 90),
              event("all-reduce of the gradient of w", 20, 5), event("gloo:all_reduce", 22, 30, thread=2),
              event("aten::mul", 40, 20), {"ph": "s", "name": "fwdbwd", "ts": 3}]  # fmt: skip
    assert cpu_pieces(events) == [
        Piece("aten::linear", "compute", 0, 10),
        Piece("gloo:all_reduce", "communication", 22, 52),
        Piece("aten::mul", "compute", 40, 60),
    ]


def test_ranges_on_the_gpu_are_not_work() -> None:
    """Between the kernels the GPU is idle or only communicates, although ranges cover the whole time."""
    trace = Trace()
    trace.annotation("Optimizer.step#AdamW.step", 0.0, 90.0, (1000.0, 9000.0))
    trace.annotation("comm: updated parameters, round 2", 10.0, 20.0, (1000.0, 9000.0))
    trace.annotation("updated parameters, round 2", 10.0, 20.0, (1000.0, 9000.0))
    trace.annotation("nccl:all_reduce", 30.0, 40.0, (1000.0, 9000.0))
    trace.kernel(COPY, 5.0, (1000.0, 1500.0), stream=20, category="gpu_memcpy", api="cudaMemcpyAsync")
    trace.kernel("Memset (Device)", 6.0, (1500.0, 1600.0), category="gpu_memset", api="cudaMemsetAsync")
    trace.kernel(SGEMM, 8.0, (2000.0, 4000.0))
    trace.kernel(ALL_REDUCE, 35.0, (3000.0, 6000.0), stream=24)
    trace.kernel(MUL, 60.0, (8000.0, 8500.0))
    assert streams_of(gpu_pieces(trace.events)) == {
        "compute": [(0.0, 0.6), (1.0, 3.0), (7.0, 7.5)],
        "communication": [(2.0, 5.0)],
    }
    assert [event["name"] for event in gpu_events(trace.events)] == [COPY, "Memset (Device)", SGEMM, ALL_REDUCE, MUL]


def test_a_training_step_is_idle_before_its_optimizer_and_after() -> None:
    """Gaps of 60 and 30 us, the second inside the range `optimizer` on the GPU."""
    found = streams_of(gpu_pieces(training_steps(1)))
    assert found == {"compute": [(0.0, 2.18), (2.24, 2.51), (2.54, 2.57)], "communication": []}


def test_a_trace_of_a_cpu_has_no_intervals() -> None:
    events = [event for event in training_steps() if event["pid"] != 0]
    assert streams_of(gpu_pieces(events)) == {"compute": [], "communication": []}


# Gathers


def gather(trace: Trace, unit: str, asked: float, ran: tuple[float, float], thread: int = MAIN) -> None:
    """A range of 10 us that launches a transfer in its middle."""
    trace.annotation(f"gather of {unit}", asked, asked + 10, ran, thread)
    trace.kernel(ALL_GATHER, asked + 5, ran, thread=thread, stream=24)


def gather_by_copies(trace: Trace, unit: str, asked: float, ran: tuple[float, float], thread: int = MAIN) -> None:
    """The same by two copies, of the rank's own part first."""
    trace.annotation(f"gather of {unit}", asked, asked + 10, ran, thread)
    (begin, end), half = ran, sum(ran) / 2
    copies = dict(thread=thread, stream=24, category="gpu_memcpy", api="cudaMemcpyAsync")
    trace.kernel(OWN_PART, asked + 4, (begin, half), **copies)
    trace.kernel(FROM_PEER, asked + 6, (half, end), **copies)


def wait(trace: Trace, unit: str, at: float, thread: int = MAIN) -> None:
    trace.annotation(f"wait for gather of {unit}", at, at + 2, (at, at), thread)


def step(gather: Callable[..., None] = gather) -> Trace:
    """The host runs ahead until it is late for `head`; the backward pass of `block` has its own thread."""
    trace = Trace()
    gather(trace, "embedding", 0.0, (10.0, 110.0))
    wait(trace, "embedding", 12.0)
    gather(trace, "block", 20.0, (110.0, 410.0))
    trace.kernel(SGEMM, 32.0, (110.0, 310.0))  # could have run from 32 on
    wait(trace, "block", 40.0)
    trace.kernel(COPY, 50.0, (410.0, 420.0), category="gpu_memcpy")  # could have run from 310 on
    trace.kernel(SGEMM, 55.0, (420.0, 500.0))
    gather(trace, "head", 60.0, (420.0, 450.0))
    wait(trace, "head", 690.0)
    trace.kernel(SGEMM, 700.0, (705.0, 800.0))  # the host is late; the gather ended at 450
    gather(trace, "block", 710.0, (720.0, 790.0), BACKWARD)
    wait(trace, "block", 730.0, BACKWARD)
    trace.kernel(SGEMM, 735.0, (900.0, 910.0), stream=30)  # another thread's kernel, which did not wait
    trace.kernel(SGEMM, 740.0, (800.0, 850.0), thread=BACKWARD)  # the kernel before ends at 800
    gather(trace, "last", 950.0, (960.0, 970.0))
    wait(trace, "last", 980.0)  # no work follows
    return trace


@pytest.mark.parametrize("how", [gather, gather_by_copies])
def test_slack_runs_from_the_end_of_a_gather_to_the_first_possible_use(how: Callable[..., None]) -> None:
    found = gathers_of(step(how).events)["gathers"]
    assert [(each["unit"], each["turn"]) for each in found] == [
        ("embedding", 1),
        ("block", 1),
        ("head", 1),
        ("block", 2),
    ]
    assert [each["ms"] for each in found] == pytest.approx([0.1, 0.3, 0.03, 0.07])
    assert [each["slack_ms"] for each in found] == pytest.approx([-0.078, -0.1, 0.25, 0.01])
    assert [each["stall_ms"] for each in found] == pytest.approx([0.078, 0.1, 0, 0])


def test_the_summary_counts_gathers_in_time_and_adds_up_stalls() -> None:
    found = gathers_of(step().events)
    assert (found["gathers_in_time"], found["gathers_counted"]) == (2, 4)
    assert found["stall_ms"] == pytest.approx(0.178)
    assert found["gathers"][3] == pytest.approx(
        {"unit": "block", "turn": 2, "ms": 0.07, "slack_ms": 0.01, "stall_ms": 0}
    )


def test_on_a_cpu_gloos_transfers_match_gathers_in_order() -> None:
    events = [event("gloo:all_gather", 0, 5, 2), event("gather of a", 10, 4), event("gather of b", 20, 4),
              event("gloo:all_gather", 12, 50, 3), event("gloo:all_gather", 22, 10, 2),
              event("wait for gather of a", 30, 32), event("wait for gather of b", 70, 1)]  # fmt: skip
    found = gathers_of(events)["gathers"]
    assert [each["unit"] for each in found] == ["a", "b"]
    assert [each["ms"] for each in found] == pytest.approx([0.05, 0.01])
    assert [each["slack_ms"] for each in found] == pytest.approx([-0.032, 0.038])


def test_a_trace_without_gathers_has_none() -> None:
    assert gathers_of([]) == {"gathers": [], "gathers_in_time": 0, "gathers_counted": 0, "stall_ms": 0}


# Clocks


def test_gradients_are_cleared_before_each_timed_call() -> None:
    x = torch.ones(3, requires_grad=True)
    calls = []

    def work() -> None:
        calls.append(x.grad)
        x.sum().backward()

    times = time_ms(work, torch.device("cpu"), warmup_ms=0.0, rep_ms=1000.0, gradients_of=[x])
    assert len(calls) == 5 + len(times)  # five estimate the duration of a call
    calls.clear()
    times = time_ms(work, torch.device("cpu"), warmup_ms=0.0, rep_ms=0.0, gradients_of=[x])
    assert len(calls) == len(times) == 1  # a long call is not repeated
    assert all(grad is None for grad in calls)


@pytest.mark.parametrize("host_time", [True, False])
def test_on_a_gpu_the_cache_is_flushed_before_each_call(host_time: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    event = SimpleNamespace(record=lambda: seen.append("event"), elapsed_time=lambda end: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(zero_=lambda: seen.append("flushed")))
    x = SimpleNamespace(grad=1)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: seen.append("slept"))
    work = lambda: seen.append(f"work, {x.grad}")  # noqa: E731
    times, period = timing._gpu_times(work, 2, [x], torch.device("cuda"), host_time)
    assert (times, period) == ([2.0, 2.0], 2.0)
    slept = [] if host_time else ["slept"]
    assert seen == 2 * ["event", *slept, "flushed", "event", "work, None", "event"] + ["waited"]


@pytest.mark.gpu
@pytest.mark.timing
def test_the_hosts_time_counts_unless_the_gpu_waits_for_the_host() -> None:
    x = torch.zeros(8, device="cuda")

    def work() -> None:
        time.sleep(1e-3)
        x.add_(1)

    for host_time, in_range in ((True, lambda ms: ms > 0.5), (False, lambda ms: ms < 0.1)):
        times = time_ms(work, x.device, warmup_ms=5, rep_ms=50, host_time=host_time)
        assert in_range(statistics.median(times)), (host_time, times)


def test_on_a_gpu_the_flushes_count_towards_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(
        timing, "_gpu_times", lambda work, count, *_, **__: (counts.append(count) or count * [0.02], 0.125)
    )
    times = time_ms(lambda: None, torch.device("cuda"), warmup_ms=25, rep_ms=100)
    assert times == 800 * [0.02]
    assert counts == [1, 4, 200, 800]


def test_warm_up_calls_come_before_measured_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(timing, "_cpu_times", lambda work, count, *_: (counts.append(count) or count * [2.0], 2.0))
    assert len(time_ms(lambda: None, torch.device("cpu"), warmup_ms=20, rep_ms=100)) == 50
    assert counts == [1, 4, 10, 50]


def test_a_call_shorter_than_the_clocks_tick_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_cpu_times", lambda work, count, *_: (count * [0.0], 0.0))
    for rep_ms, count in ((0.0, 1), (0.1, 100)):
        assert time_ms(lambda: None, torch.device("cpu"), warmup_ms=0.1, rep_ms=rep_ms) == count * [0.0]


def test_laps_follow_the_clock() -> None:
    now = iter((10.0, 10.5, 12.0))
    watch = Stopwatch(torch.device("cpu"), lambda: next(now))
    assert [watch.lap_ms(), watch.lap_ms()] == [500.0, 1500.0]


def test_a_lap_ends_when_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(timing, "wait_for", lambda device: seen.append(f"waited for {device}"))
    watch = Stopwatch(torch.device("cpu"), lambda: seen.append("looked at the clock") or 0.0)
    watch.lap_ms()
    assert seen == 2 * ["waited for cpu", "looked at the clock"]
