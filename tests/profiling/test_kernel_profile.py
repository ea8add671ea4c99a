"""`cs336 profile kernels`: numbers from a made-up trace with known answers, and the whole command on a CPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.instruments.trace import read_trace
from cs336_systems.bench.profiling import kernel_profile
from cs336_systems.bench.profiling.kernel_profile import CASE, KernelProfile, profile_with_torch
from cs336_systems.bench.profiling.kernel_totals import (
    CLASSES,
    KernelTotal,
    add_up,
    busy_ms,
    kernel_metrics,
    span_metrics,
)
from cs336_systems.bench.profiling.kernel_trace import SCORES, SOFTMAX, VALUES, Kernel, gpu_kernels
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.cli.report import make_report
from cs336_systems.report.kernel_profiles import CLASS_COLORS, plot_shares, short_name, top_kernels_tables
from cs336_systems.report.views import rows_table
from tests.systems.command import Run

from .gpu_trace import MUL, SGEMM, inference_step, training_steps

STEPS = 2
QUICK: dict[str, Any] = dict(size="quick", context_length=32, batch_size=2, device="cpu")
CONFIG: dict[str, Any] = dict(
    size="small",
    batch_size=4,
    context_length=512,
    precision="fp32",
    attention="naive",
    compile=False,
    activation_checkpointing="none",
    device="cuda",
    warmup=5,
    steps=STEPS,
    tool="torch",
    attention_ranges=True,
)


def made_up_row(mode: str = "train_step", **config: Any) -> Row:
    """The row of a made-up trace."""
    events, steps = (training_steps(STEPS), STEPS) if mode == "train_step" else (inference_step(), 1)
    kernels = gpu_kernels(events)
    totals = add_up(kernels, steps)
    metrics = {
        "wall_ms": 3.0,
        "profiled_wall_ms": 3.5,
        "kernel_ms": sum(total.ms for total in totals),
        "busy_ms": busy_ms(kernels, steps),
        "phase_wall_ms": {"forward": 1.0, "backward": 1.5, "optimizer": 0.5} if steps > 1 else {"forward": 0.4},
        "attention_operations": {SCORES: 4 * 10**9, SOFTMAX: 10**9, VALUES: 4 * 10**9},
    }
    metrics |= kernel_metrics(totals, mode)
    env = {"gpu": "NVIDIA H200"}
    return Row(
        case="profile-kernels", variant=mode, config={**CONFIG, "mode": mode, **config}, metrics=metrics, env=env
    )


# Numbers


def test_totals_are_a_step_and_the_longest_comes_first() -> None:
    totals = add_up(gpu_kernels(training_steps(STEPS)), STEPS)
    assert totals[0] == KernelTotal(SGEMM, "backward", None, 1.0, 0.5)
    assert sum(total.ms for total in totals) == pytest.approx(2.510)
    assert sum(total.calls for total in totals) == 13
    assert [total.ms for total in totals] == sorted((total.ms for total in totals), reverse=True)


def test_overlapping_kernels_on_two_streams_are_busy_once() -> None:
    kernels = gpu_kernels(training_steps(STEPS))
    assert busy_ms(kernels, STEPS) == pytest.approx(2.510 - 0.030)  # the copy's 30 us beside the projection


def test_shares_of_classes_in_every_span_of_a_training_step() -> None:
    spans = made_up_row().metrics["spans"]
    assert {name: round(1e3 * span["kernel_ms"]) for name, span in spans.items()} == {
        "forward": 790,
        "backward": 1420,
        "optimizer": 270,
        "forward + backward": 2210,
        "training step": 2510,
    }
    forward, backward = spans["forward"]["share"], spans["backward"]["share"]
    assert forward["matmul"] == pytest.approx(650 / 790)
    assert forward["softmax"] == pytest.approx(100 / 790)
    assert forward["copy"] == pytest.approx(40 / 790)
    assert backward["matmul"] == pytest.approx(1200 / 1420)
    assert backward["elementwise"] == pytest.approx(60 / 1420)
    assert spans["optimizer"]["share"]["optimizer"] == 1
    assert spans["training step"]["share"]["matmul"] == pytest.approx(1850 / 2510)
    assert spans["training step"]["share"]["elementwise"] == pytest.approx((60 + 30) / 2510)
    for span in spans.values():
        assert list(span["share"]) == list(CLASSES)
        assert sum(span["share"].values()) == pytest.approx(1)
        assert sum(span["class_ms"].values()) == pytest.approx(span["kernel_ms"])


def test_the_longest_kernels_count_their_calls_over_all_ranges() -> None:
    spans = made_up_row().metrics["spans"]
    top = spans["forward"]["top"][0]
    assert (top["kernel"], top["class"], top["calls"]) == (SGEMM, "matmul", 3)
    assert (top["ms"], top["share"]) == (pytest.approx(0.650), pytest.approx(650 / 790))
    assert spans["training step"]["top"][0]["calls"] == 6
    assert [kernel["calls"] for kernel in spans["training step"]["top"] if kernel["kernel"] == MUL] == [2, 1]


def test_only_the_ten_longest_kernels_are_listed_and_a_phase_without_any_has_no_shares() -> None:
    totals = [KernelTotal(f"aten::op{i}", "forward", None, 1, float(i)) for i in range(20)]
    assert [kernel["ms"] for kernel in span_metrics(totals, ("forward",))["top"]] == list(range(19, 9, -1))
    nothing = span_metrics(totals, ("backward",))
    assert (nothing["kernel_ms"], nothing["top"], set(nothing["share"].values())) == (0, [], {0.0})


def test_attention_is_split_into_its_parts_forward_and_backward() -> None:
    attention = made_up_row().metrics["attention"]
    ms = {(part, phase): of_class for part, phases in attention.items() for phase, of_class in phases.items()}
    assert ms == {
        (SCORES, "forward"): {"matmul": pytest.approx(0.200)},
        (SOFTMAX, "forward"): {"softmax": pytest.approx(0.100)},
        (VALUES, "forward"): {"matmul": pytest.approx(0.150)},
        (SCORES, "backward"): {"matmul": pytest.approx(0.400)},
        (SOFTMAX, "backward"): {"softmax": pytest.approx(0.160)},
        (VALUES, "backward"): {"matmul": pytest.approx(0.300)},
    }


def test_kernels_outside_all_phases_count_in_the_step() -> None:
    row = made_up_row("forward")
    assert row.metrics["outside_ms"] == pytest.approx(0.010)
    assert row.metrics["spans"]["inference"]["kernel_ms"] == pytest.approx(0.310)


# Files, tables, the picture


def test_the_table_of_rows_shows_inference_beside_training() -> None:
    table = rows_table([made_up_row("forward"), made_up_row()])
    assert "NVIDIA H200; size small; context_length 512; batch_size 4; precision fp32;" in table
    lines = {tuple(line.split(" | ")[:2]): line.split(" | ") for line in table.splitlines()}
    expected = [("forward", "inference", "0.4", "96.8%"), ("train_step", "forward", "1", "82.3%"),
                ("train_step", "backward", "1.5", "84.5%"), ("train_step", "optimizer", "0.5", "-"),
                ("train_step", "forward + backward", "2.5", "83.7%"),
                ("train_step", "training step", "3", "73.7%")]  # fmt: skip
    for mode, span, clock_ms, matmul in expected:
        assert lines[f"| {mode}", span][3:5] == [clock_ms, matmul]
    assert "| train_step | 3 | 3.5 | 2.51 | 2.48 |" in table
    assert "| forward | scores: Q K^T | 4 | 0.2 |" in table
    assert "| backward | softmax | 1 | 0.16 |" in table


def test_rows_of_other_configurations_are_told_apart_and_the_last_row_counts() -> None:
    rows = [made_up_row(), made_up_row(), made_up_row(context_length=1024)]
    times = rows_table(rows).split("\n\n")[1].splitlines()
    assert [line.split(" | ")[0] for line in times[2:]] == ["| 512", "| 1024"]


def test_a_row_that_did_not_fit_is_told_and_one_without_its_numbers_is_refused() -> None:
    oom = Row(case="profile-kernels", variant="train_step", config=CONFIG, status="oom", error="too much", env={})
    assert "| train_step | out of memory |" in rows_table([oom])
    with pytest.raises(KeyError, match="phase_wall_ms"):
        rows_table([Row(case="profile-kernels", variant="train_step", config=CONFIG, env={})])


def test_long_kernel_names_are_shortened() -> None:
    name = "void at::native::(anonymous namespace)::softmax_warp_forward<" + "float, " * 40
    assert short_name(name).startswith("softmax_warp_forward<float")
    assert len(short_name(name)) == 90
    assert short_name("aten::mm") == "aten::mm"


def test_every_class_has_a_colour_of_its_own(tmp_path: Path) -> None:
    assert list(CLASS_COLORS) == list(CLASSES)
    assert len(set(CLASS_COLORS.values())) == len(CLASSES)
    plot_shares([made_up_row("forward"), made_up_row()], tmp_path / "shares.png")
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


# The command


def test_the_command_on_a_cpu_from_end_to_end(tmp_path: Path, cs336: Run) -> None:
    code, said, _ = cs336("profile", "kernels", "--quick", "--out", str(tmp_path / "out"))
    assert code == 0
    names = {"rows.jsonl", "shares.png", "trace_forward.json.gz", "trace_train_step.json.gz"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert [(row.variant, row.status, row.config["size"]) for row in rows] == [
        ("forward", "ok", "quick"),
        ("train_step", "ok", "quick"),
    ]
    spans = rows[0].metrics["spans"] | rows[1].metrics["spans"]
    for name in ("inference", "forward", "backward", "training step"):
        assert 0 < spans[name]["share"]["matmul"] < 1
        assert 0 < spans[name]["share"]["softmax"] < 1
        assert name in said
    # In each of 2 layers 7 projections, and the head; the gradients of weights and inputs double that.
    for name, calls in (("inference", 15), ("forward", 15), ("backward", 30)):
        assert [top["calls"] for top in spans[name]["top"] if top["kernel"] == "aten::mm"] == [calls]
    operations = rows[0].metrics["attention_operations"]
    assert operations == {SCORES: 2 * 2 * 2 * 32 * 32 * 32, SOFTMAX: 5 * 2 * 2 * 2 * 32 * 32, VALUES: 262_144}
    assert "nsys" not in said  # it needs a GPU
    assert make_report(["rows", str(tmp_path / "out" / "rows.jsonl")]) in said
    with gzip.open(tmp_path / "out" / "trace_train_step.json.gz") as file:
        assert {"forward", "backward", "optimizer"} <= {event.get("name") for event in json.load(file)["traceEvents"]}


def test_options_override_quick_and_the_row_has_them(tmp_path: Path, cs336: Run) -> None:
    given = ["--modes", "forward_backward", "--context_length", "16", "--attention", "sdpa", "--steps", "2"]
    code, said, _ = cs336("profile", "kernels", "--quick", *given, "--out", str(tmp_path))
    assert code == 0
    assert "attention is split into" in said
    (row,) = read_rows(tmp_path / "rows.jsonl")
    chosen = {name: row.config[name] for name in ("mode", "context_length", "attention", "steps", "batch_size")}
    assert chosen == dict(mode="forward_backward", context_length=16, attention="sdpa", steps=2, batch_size=2)
    assert row.config["attention_ranges"] is False
    assert row.metrics["attention"] == {}
    assert list(row.metrics["phase_wall_ms"]) == ["forward", "backward"]
    assert row.metrics["spans"]["forward"]["share"]["attention"] > 0


def test_a_mode_that_does_not_fit_is_a_row_and_the_next_one_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(config: KernelProfile) -> Any:
        if config.mode == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return {"size": "quick"}, {"wall_ms": 1.0}

    monkeypatch.setattr(kernel_profile, "profile_with_torch", profile)
    configs = [KernelProfile(**QUICK, mode=mode, folder=str(tmp_path)) for mode in ("forward", "train_step")]
    rows = list(CASE.measure(configs))
    assert [(row.variant, row.status) for row in rows] == [("forward", "oom"), ("train_step", "ok")]
    assert rows[0].config["context_length"] == 32
    assert rows[0].metrics == {"requested_bytes": 2 << 30}


def test_profiled_steps_alone_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up, timed steps and the profiler's own first step leave no trace."""
    seen: list[list[Kernel]] = []
    totals: list[KernelTotal] = []

    def spy(kernels: list[Kernel], steps: int) -> list[KernelTotal]:
        seen.append(kernels)
        totals.extend(add_up(kernels, steps))
        return totals

    monkeypatch.setattr(kernel_profile, "add_up", spy)
    profile_with_torch(KernelProfile(**QUICK, mode="forward", warmup=2, steps=3, folder=str(tmp_path)))
    assert sum(kernel.name == "aten::embedding" for kernel in seen[0]) == 3
    assert sum(total.calls for total in totals if total.name == "aten::mm") == 15


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_every_kernel_has_its_phase_and_the_sums_match(precision: str, compiled: bool, tmp_path: Path) -> None:
    given = dict(size="small", context_length=256, precision=precision, compile=compiled, device="cuda", steps=2)
    for mode, span in (("forward", "inference"), ("train_step", "training step")):
        ran, m = profile_with_torch(KernelProfile(**given, mode=mode, folder=str(tmp_path)))  # type: ignore[arg-type]
        spans = m["spans"]
        whole = spans[span]
        assert whole["kernel_ms"] == pytest.approx(m["kernel_ms"])
        assert m["outside_ms"] <= 0.001 * m["kernel_ms"]
        assert m["busy_ms"] <= m["kernel_ms"] * (1 + 1e-5)  # of times in ns: each end is rounded
        assert m["busy_ms"] <= m["profiled_wall_ms"]
        assert m["kernel_ms"] <= m["profiled_wall_ms"] * m["streams"]
        assert whole["share"]["matmul"] > 0.1
        assert whole["share"]["other"] < 0.1
        assert ran["attention_ranges"] is not compiled
        if mode == "train_step":
            phases = sum(spans[name]["kernel_ms"] for name in ("forward", "backward", "optimizer"))
            assert phases == pytest.approx(m["kernel_ms"], rel=0.001)
            assert spans["backward"]["kernel_ms"] > spans["forward"]["kernel_ms"]


@pytest.mark.gpu
def test_on_a_gpu_the_parts_of_attention_are_told_apart_forward_and_backward(tmp_path: Path) -> None:
    config = KernelProfile(size="small", mode="train_step", device="cuda", steps=2, folder=str(tmp_path))
    profile_with_torch(config)
    totals = add_up(gpu_kernels(read_trace(tmp_path / "trace_train_step.json.gz")), config.steps)
    layers = config.shape.num_layers

    def calls(part: str, phase: str, kind: str) -> float:
        return sum(t.calls for t in totals if (t.part, t.phase, t.kind) == (part, phase, kind))

    for part in (SCORES, VALUES):
        assert calls(part, "forward", "matmul") >= layers
        assert calls(part, "backward", "matmul") >= 2 * layers
    assert calls(SOFTMAX, "forward", "softmax") == calls(SOFTMAX, "backward", "softmax") == layers


def test_the_terminal_lists_the_longest_kernels_of_each_phase() -> None:
    said = top_kernels_tables(made_up_row())
    assert "forward: 0.79 ms of kernels a step" in said
    assert f"| 1 | matmul | 3 | 0.65 | 82.3% | `{short_name(SGEMM)}` |" in said
    assert "forward + backward" not in said
