"""The streams of a step, in synthetic traces whose every microsecond is known; and the profiler."""

import os

import pytest
import torch

from cs336_systems.bench.instruments.intervals import length, merge, overlap
from cs336_systems.bench.instruments.streams import Piece, by_name, cpu_pieces, gpu_pieces, streams_of, totals
from cs336_systems.bench.instruments.trace import Profiler, gpu_events
from tests.profiling.gpu_trace import COPY, MUL, SGEMM, Trace, training_steps

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def test_touching_spans_are_merged() -> None:
    assert merge([(3, 4), (0, 1), (1, 2), (1.5, 1.8)]) == [(0, 2), (3, 4)]
    assert merge([(0, 1), (1.2, 2)], gap=0.3) == [(0, 2)]
    assert length([(0, 2), (3, 4)]) == 3


def test_overlap_is_the_length_of_the_intersection() -> None:
    assert overlap([(0, 4), (6, 8)], [(1, 2), (3, 7)]) == 1 + 1 + 1
    assert overlap([(0, 1)], [(1, 2)]) == 0
    assert overlap([], [(1, 2)]) == 0


def test_nccl_kernels_are_communication() -> None:
    kernels = [("gemm", 1000.0, 2000.0), (ALL_REDUCE, 2000.0, 4000.0), ("add", 2500.0, 1500.0)]
    events = [{"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in kernels]
    found = gpu_pieces(events)
    assert streams_of(found) == {"compute": [(0.0, 3.0)], "communication": [(1.0, 5.0)]}
    assert by_name(found) == {
        "names": ["gemm", ALL_REDUCE, "add"],
        "pieces": {"compute": [[0, 0.0, 2.0], [2, 1.5, 3.0]], "communication": [[1, 1.0, 5.0]]},
    }


def test_half_of_the_communication_is_overlapped() -> None:
    found = totals({"compute": [(0, 3)], "communication": [(1, 5)]})
    assert list(found.values()) == [5, 3, 4, 2, 0.5]
    assert totals({"compute": [(0, 3)], "communication": []})["overlapped"] is None


def test_on_a_cpu_operators_compute_and_gloos_threads_communicate() -> None:
    def event(name: str, start: float, duration: float, thread: int = 1) -> dict[str, object]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "tid": thread}

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


def test_the_profilers_notices_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with Profiler(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(3) + 1
    assert "aten::add" in {event.name for event in profiler.events()}
    assert capfd.readouterr().err == ""


def test_other_output_during_the_profilers_start_is_passed_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_trace(_: object) -> None:
        os.write(2, b"USDT:2026-01-01 handler.cpp:52] profiler_start\nERROR: no permission\nhalf a line")
        raise RuntimeError("no trace")

    monkeypatch.setattr(torch.profiler.profile, "start_trace", start_trace)
    with pytest.raises(RuntimeError, match="no trace"):
        Profiler(activities=[torch.profiler.ProfilerActivity.CPU]).start()
    os.write(2, b", and its end")
    assert capfd.readouterr().err == "ERROR: no permission\nhalf a line, and its end"
