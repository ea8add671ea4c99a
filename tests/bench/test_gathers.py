"""Gathers in synthetic traces whose every microsecond is known."""

from typing import Any

import pytest

from cs336_systems.bench.instruments.gathers import gathers_of, summary
from tests.profiling.gpu_trace import BACKWARD, COPY, MAIN, SGEMM, Trace

ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gather(trace: Trace, unit: str, asked: float, ran: tuple[float, float], thread: int = MAIN) -> None:
    """A range of 10 us that launches a transfer in its middle."""
    trace.annotation(f"gather of {unit}", asked, asked + 10, ran, thread)
    trace.kernel(ALL_GATHER, asked + 5, ran, thread=thread, stream=24)


def wait(trace: Trace, unit: str, at: float, thread: int = MAIN) -> None:
    trace.annotation(f"wait for gather of {unit}", at, at + 2, (at, at), thread)


def step() -> Trace:
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


def test_slack_runs_from_the_end_of_a_gather_to_the_first_possible_use() -> None:
    found = gathers_of(step().events)
    assert [(each.unit, each.turn) for each in found] == [("embedding", 1), ("block", 1), ("head", 1), ("block", 2)]
    assert [each.ms for each in found] == pytest.approx([0.1, 0.3, 0.03, 0.07])
    assert [each.slack_ms for each in found] == pytest.approx([-0.078, -0.1, 0.25, 0.01])
    assert [each.stall_ms for each in found] == pytest.approx([0.078, 0.1, 0, 0])


def test_the_summary_counts_gathers_in_time_and_adds_up_stalls() -> None:
    found = summary(gathers_of(step().events))
    assert (found["gathers_in_time"], found["gathers_counted"]) == (2, 4)
    assert found["stall_ms"] == pytest.approx(0.178)
    assert found["gathers"][3] == pytest.approx(
        {"unit": "block", "turn": 2, "ms": 0.07, "slack_ms": 0.01, "stall_ms": 0}
    )


def test_on_a_cpu_gloos_transfers_match_gathers_in_order() -> None:
    def event(name: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": duration, "pid": 1, "tid": thread}

    events = [event("gloo:all_gather", 0, 5, 2), event("gather of a", 10, 4), event("gather of b", 20, 4),
              event("gloo:all_gather", 12, 50, 3), event("gloo:all_gather", 22, 10, 2),
              event("wait for gather of a", 30, 32), event("wait for gather of b", 70, 1)]  # fmt: skip
    found = gathers_of(events)
    assert [each.unit for each in found] == ["a", "b"]
    assert [each.ms for each in found] == pytest.approx([0.05, 0.01])
    assert [each.slack_ms for each in found] == pytest.approx([-0.032, 0.038])


def test_a_trace_without_gathers_has_none() -> None:
    assert summary(gathers_of([])) == {"gathers": [], "gathers_in_time": 0, "gathers_counted": 0, "stall_ms": 0}
