"""Kernels from traces: made-up ones of a GPU, whose answers are known, and real ones of the CPU."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.instruments.trace import read_trace
from cs336_systems.bench.profiling.kernel_profile import annotate_attention
from cs336_systems.bench.profiling.kernel_trace import (
    OUTSIDE,
    SCORES,
    SOFTMAX,
    VALUES,
    Kernel,
    cpu_kernels,
    gpu_kernels,
)
from cs336_systems.bench.workload import PHASES, Workbench, Workload

from . import gpu_trace
from .gpu_trace import ADAM, COPY, HOST, MAIN, MUL, SGEMM, SOFTMAX_BACKWARD, SOFTMAX_FORWARD

# Name, phase, range of attention and us of the kernels in each step of `training_steps`.
STEP = {
    (COPY, "forward", None, 40.0): 1,
    (SGEMM, "forward", None, 300.0): 1,
    (SGEMM, "forward", SCORES, 200.0): 1,
    (SOFTMAX_FORWARD, "forward", SOFTMAX, 100.0): 1,
    (SGEMM, "forward", VALUES, 150.0): 1,
    (SGEMM, "backward", VALUES, 300.0): 1,
    (SOFTMAX_BACKWARD, "backward", SOFTMAX, 160.0): 1,
    (SGEMM, "backward", SCORES, 400.0): 1,
    (SGEMM, "backward", None, 500.0): 1,
    (MUL, "backward", None, 60.0): 1,
    (ADAM, "optimizer", None, 250.0): 1,
    (MUL, "optimizer", None, 20.0): 1,
    (MUL, OUTSIDE, None, 30.0): 1,
}


def counted(kernels: list[Kernel]) -> Counter[tuple[Any, ...]]:
    return Counter((k.name, k.phase, k.part, k.duration_us) for k in kernels)


@pytest.mark.parametrize("steps", [1, 2])
def test_every_kernel_is_in_the_phase_and_range_that_launched_it(steps: int) -> None:
    kernels = gpu_kernels(gpu_trace.training_steps(steps))
    assert counted(kernels) == Counter({key: count * steps for key, count in STEP.items()})
    assert [k.start_us for k in kernels] == sorted(k.start_us for k in kernels)
    assert {k.stream for k in kernels} == {"0:7", "0:20"}


def test_the_order_of_events_in_the_file_does_not_matter() -> None:
    events = gpu_trace.training_steps()
    assert gpu_kernels(events[::-1]) == gpu_kernels(events)


def test_without_autograds_links_the_backward_pass_has_no_ranges_but_its_phase() -> None:
    events = [event for event in gpu_trace.training_steps(1) if event.get("cat") != "fwdbwd"]
    for kernel in gpu_kernels(events):
        assert kernel.part is None or kernel.phase == "forward"
    assert Counter(k.phase for k in gpu_kernels(events)) == Counter(phase for _, phase, *_ in STEP)


def test_a_forward_pass_repeated_in_the_backward_pass_counts_as_backward_in_its_own_ranges() -> None:
    trace = gpu_trace.Trace()
    trace.annotation("backward", 0.0, 100.0, (60.0, 300.0))
    trace.annotation(SCORES, 10.0, 20.0, (60.0, 160.0), thread=gpu_trace.BACKWARD)
    trace.kernel(SGEMM, 15.0, (60.0, 160.0), thread=gpu_trace.BACKWARD)
    trace.kernel(SGEMM, 15.0, (160.0, 260.0), thread=MAIN)
    assert [(k.phase, k.part) for k in gpu_kernels(trace.events)] == [("backward", SCORES), ("backward", None)]


def test_a_kernel_whose_launch_is_not_in_the_trace_is_outside() -> None:
    kernels = gpu_kernels(gpu_trace.inference_step())
    assert [(k.name, k.phase) for k in kernels] == [(SGEMM, "forward"), (MUL, OUTSIDE)]


def test_a_gpu_trace_without_kernels_is_not_taken_for_an_idle_gpu() -> None:
    events = [event for event in gpu_trace.training_steps() if event.get("cat") not in ("kernel", "gpu_memcpy")]
    with pytest.raises(RuntimeError, match="no GPU kernels"):
        gpu_kernels(events)


def test_an_operators_own_time_excludes_the_operators_it_calls() -> None:
    def op(name: str, start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": HOST, "tid": thread, "ts": start, "dur": end - start}

    events = [
        op("aten::linear", 0, 100),
        op("aten::t", 10, 20),
        op("aten::matmul", 20, 90),
        op("aten::mm", 30, 85),
        op("aten::add", 100, 130),
        op("aten::mul", 5, 95, thread=7),  # another thread: inside of nothing
        op("autograd::engine::evaluate_function: MulBackward0", 200, 300),
        op("MulBackward0", 210, 290),
        op("aten::mul", 220, 280),
    ]
    own = Counter[str]()
    for kernel in cpu_kernels(events):
        own[kernel.name] += kernel.duration_us
    assert own == {
        "aten::linear": 20,
        "aten::t": 10,
        "aten::matmul": 15,
        "aten::mm": 55,
        "aten::add": 30,
        "aten::mul": 90 + 60,
    }


def profiled(**fields: Any) -> list[dict[str, Any]]:
    """The real trace of two training steps on the CPU."""
    given = dict(size="quick", context_length=16, batch_size=2, device="cpu", mode="train_step")
    bench = Workbench(Workload(**{**given, **fields}))
    annotate_attention(bench)
    bench.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        bench.step()
        bench.step()
    profile.export_chrome_trace("trace.json.gz")
    return read_trace(Path("trace.json.gz"))


def test_a_real_trace_has_each_product_of_attention_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 steps x 2 layers: one product forward, its two gradients backward; with checkpointing one more there."""
    monkeypatch.chdir(tmp_path)
    for checkpointing, backward in (("none", 2), ("block", 3)):
        kernels = cpu_kernels(profiled(activation_checkpointing=checkpointing))
        products = Counter((k.phase, k.part) for k in kernels if k.name == "aten::bmm")
        expected = {("forward", part): 4 for part in (SCORES, VALUES)}
        assert products == expected | {("backward", part): 4 * backward for part in (SCORES, VALUES)}
        softmax = Counter((k.name, k.phase) for k in kernels if k.part == SOFTMAX and "_softmax" in k.name)
        assert softmax["aten::_softmax_backward_data", "backward"] == softmax["aten::_softmax", "forward"] == 4


def test_operators_of_a_real_trace_fill_no_more_than_their_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    events = profiled()
    for phase in PHASES:
        ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == phase]
        spent = sum(k.duration_us for k in cpu_kernels(events) if k.phase == phase)
        assert len(ranges) == 2
        assert 0.02 * sum(e["dur"] for e in ranges) < spent <= 1.001 * sum(e["dur"] for e in ranges)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_is_read_with_and_without_compression(name: str, tmp_path: Path) -> None:
    events = gpu_trace.training_steps()
    content = json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read_trace(tmp_path / name) == events
