"""The cases `model` and `warmup`, and their workload."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.bench import case as sweep
from cs336_systems.bench import workload
from cs336_systems.bench.case import check_sized_for_gpu, configurations
from cs336_systems.bench.cases import NAMES, get_case
from cs336_systems.bench.cases import model as case
from cs336_systems.bench.instruments.timing import Stopwatch
from cs336_systems.bench.worker import Worker
from cs336_systems.bench.workload import Workbench, Workload
from cs336_systems.cli import profile as profile_command
from cs336_systems.planner.accounting import forward_flops, num_parameters, training_flops
from cs336_systems.report.views import rows_table
from cs336_systems.training.build import Compiled
from tests.bench.conftest import Bench
from tests.systems.command import Run, the_line

MODES = ("forward", "forward_backward", "train_step")
QUICK: dict[str, Any] = dict(size="quick", context_length=16, batch_size=2, device="cpu")


def test_a_step_does_what_its_mode_says() -> None:
    done: dict[str, list[str]] = {}
    for mode in ("forward", "forward_backward", "train_step"):
        bench, did = Workbench(Workload(mode=mode, **QUICK)), []  # type: ignore[arg-type]
        before = [p.detach().clone() for p in bench.model.parameters()]
        seen: list[Tensor] = []
        for p in bench.model.parameters():
            p.register_hook(lambda gradient, seen=seen: seen.append(gradient))  # type: ignore[misc]
        loss = bench.step()
        assert loss.item() == pytest.approx(5.7, abs=0.3)  # ln 300: an untrained model
        did += ["backward"] if seen else []
        changed = any(not torch.equal(a, b) for a, b in zip(before, bench.model.parameters(), strict=True))
        did += ["optimizer"] if changed else []
        assert all(p.grad is None for p in bench.model.parameters())
        done[mode] = ["forward", *did]
        assert tuple(done[mode]) == bench.phases


def test_the_same_workload_has_the_same_weights_and_tokens() -> None:
    a, b = (Workbench(Workload(**QUICK)).forward() for _ in range(2))
    assert a.requires_grad
    assert torch.equal(a, b)


def test_the_configuration_is_read_back_from_the_model() -> None:
    bench = Workbench(Workload(precision="bf16", activation_checkpointing="block", **QUICK))
    bench.step()
    facts = bench.read_back()
    assert (facts["d_model"], facts["num_layers"], facts["precision"], facts["compile"]) == (32, 2, "bf16", False)
    bench.model.layers[0].forward = Compiled(bench.model.layers[0].forward)
    assert bench.read_back()["compile"]
    compiled = Workbench(Workload(compile=True, activation_checkpointing="block", **QUICK))
    assert compiled.read_back()["compile"]  # also inside checkpointing


def test_the_rates_of_a_row_follow_from_its_time() -> None:
    for config in configurations(case.CASE, {"steps": (3,)}, quick=True):
        (row,) = case.CASE.measure([config])
        metrics, shape = row.metrics, config.shape
        assert (row.status, row.error) == ("ok", None)
        assert len(metrics["steps_ms"]) == row.config["steps"] == 3
        assert metrics["step_ms"]["mean"] == pytest.approx(sum(metrics["steps_ms"]) / 3)
        assert metrics["tokens_per_s"] == pytest.approx(4 * 16 / metrics["step_ms"]["p50"] * 1e3)
        flops = (forward_flops if config.mode == "forward" else training_flops)(shape, 4, 16)
        assert metrics["tflops"] == pytest.approx(flops / metrics["step_ms"]["p50"] / 1e9)
        phases = {"forward": 1, "forward_backward": 2, "train_step": 3}[config.mode]
        assert sum(f"{name}_ms" in metrics for name in ("forward", "backward", "optimizer")) == phases


@pytest.mark.parametrize("name", ["model", "warmup", "checkpointing"])
def test_warm_up_steps_come_before_measured_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_case = get_case(name)
    steps: list[int] = []

    def step(bench: Workbench, after: Callable[[str], None] | None = None) -> None:
        for phase in bench.phases if after else ():  # the phases are timed in further steps
            after(phase)
        steps.extend([] if after else [0])

    monkeypatch.setattr(Workbench, "step", step)
    for warmup in (0, 3):
        given = {"warmup": (warmup,), "steps": (2,), "mode": ("forward_backward",)}
        steps.clear()
        (row, *_) = of_case.measure(configurations(of_case, given, quick=True)[:1])
        assert (row.error, row.config["warmup"], len(steps)) == (None, warmup, warmup + 2)


def test_phases_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    cost = {"forward": 1.0, "backward": 2.0, "optimizer_step": 4.0}

    class Slow(Workbench):
        def __getattribute__(self, name: str) -> Any:
            clock["now"] += cost.get(name, 0.0)
            return super().__getattribute__(name)

    class OfSteps(Stopwatch):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device, lambda: clock["now"])

    monkeypatch.setattr(case, "Workbench", Slow)
    monkeypatch.setattr(case, "Stopwatch", OfSteps)
    monkeypatch.setattr("cs336_systems.bench.workload.Stopwatch", OfSteps)
    _, metrics = case.measure(case.ModelBench(mode="train_step", warmup=0, steps=2, **QUICK))
    assert {name: metrics[f"{name}_ms"]["p50"] for name in ("forward", "backward", "optimizer", "step")} == {
        "forward": 1000.0, "backward": 2000.0, "optimizer": 4000.0, "step": 7000.0
    }  # fmt: skip


def test_warmup_measures_every_mode_after_up_to_five_steps() -> None:
    warmup = get_case("warmup")
    assert [config.warmup for config in configurations(warmup, {"device": ("cpu",)})] == [0, 1, 2, 5]
    rows = list(warmup.measure(configurations(warmup, {"warmup": (0,), "steps": (3,)}, ["mode"], quick=True)))
    assert [row.config["mode"] for row in rows] == list(MODES)
    assert all(f"| {mode} |" in rows_table(rows) for mode in MODES)
    assert [(row.variant, len(row.metrics["steps_ms"])) for row in rows] == [("0 warm-up steps", 3)] * 3


@pytest.mark.parametrize("name", ["model", "ddp", "bucket-size", "overlap-trace", "optimizer-sharding"])
def test_the_sweep_of_sizes_covers_the_handouts_tables(name: str) -> None:
    given = {"mode": ("forward",)} if name == "model" else {"variant": ("bucketed:100",)}
    configs = configurations(get_case(name), {"device": ("cpu",), **given}, ["size"])
    sizes = ["small", "medium", "large", "xl", "2.7B", "10B"]
    assert list(dict.fromkeys(config.size for config in configs)) == (sizes if name == "model" else sizes[:-1])


def test_the_command_writes_rows_tables_and_plots(tmp_path: Path, bench: Bench) -> None:
    arguments = ("model", "--quick", "--mode", "forward", "--context_length", "8", "16", "--out", str(tmp_path))
    code, said, _ = bench(*arguments)
    assert code == 0
    assert "context_length 8: ok" in said
    assert (tmp_path / "model.jsonl").read_text().count("\n") == 2
    table = (tmp_path / "model.md").read_text()
    assert table.strip() in said
    assert "| context length | forward (ms) |" in table
    assert (tmp_path / "model.csv").read_text().count("\n") == 3
    assert (tmp_path / "model-step.png").read_bytes().startswith(b"\x89PNG")
    assert bench(*arguments, "--resume")[0] == 0
    assert (tmp_path / "model.jsonl").read_text().count("\n") == 2


def test_quick_runs_have_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench("precision-accumulation", "--quick")[0] == bench("precision-accumulation")[0] == 0
    assert {path.parent for path in Path("runs").rglob("*.jsonl")} == {Path("runs/quick/bench"), Path("runs/bench")}
    profiled: list[str] = []
    monkeypatch.setattr(
        profile_command, "measure", lambda case, configs, path, options: profiled.append(str(path.parent)) or []
    )
    for quick in (["--quick"], ["--device", "cpu"]):
        for what in ("kernels", "memory"):
            assert profile_command.profile([what, *quick]) == 0
    kinds = ("profile/kernels", "profile/memory")
    assert profiled == [f"runs/{place}{kind}" for place in ("quick/", "") for kind in kinds]


@pytest.mark.parametrize(
    "words, message",
    [
        (["model", "--size", "small", "huge"], "size is 'huge'"),
        (["model", "--steps", "x"], "steps"),
        (["model", "--sweep", "speed"], "sweep has 'speed'"),
        (["model", "--speed", "1"], "unknown field speed"),
        (["model", "--batch_size", "2", "many"], "batch_size is many: it must be an integer"),
        (["model", "--out", "/proc/nowhere"], "out is '/proc/nowhere': it must be a folder"),
        (["model", "--out", "FOLDER/notes"], "notes': it must be a folder"),
        (["precision-accumulation", "--out", "FOLDER"], "precision-accumulation.jsonl, line 1 is not JSON"),
        (["kernels", "--dtype", "int8"], "dtype is 'int8'"),
        (["kernels", "--kernels", "flash9"], "kernel is 'flash9'"),
        (["kernels", "--shapes", "1x1x1x4294967296"], "shape is '1x1x1x4294967296'"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(Worker, "measure", None)
    files = [tmp_path / "notes", tmp_path / "precision-accumulation.jsonl"]
    for file in files:
        file.write_text("my notes")
    assert message in the_line(bench(*(word.replace("FOLDER", str(tmp_path)) for word in words), "--quick"))
    assert [file.read_text() for file in files] == ["my notes"] * 2


@pytest.mark.parametrize("name", ["bench leaderboard-2026", "bench ddp", "profile kernels", "profile memory"])
def test_gpu_sizes_need_an_explicit_cpu(name: str, monkeypatch: pytest.MonkeyPatch, cs336: Run) -> None:
    monkeypatch.setattr(sweep, "gpu_count", lambda: 0)
    line = the_line(cs336(*name.split()))
    assert line.startswith("device is 'auto', and there is no GPU: give --quick, ")
    assert line.endswith(f"{name} is sized for one")


def test_an_explicit_cpu_prints_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    check_sized_for_gpu("bench model", "cpu")
    assert capsys.readouterr().out.startswith("bench model is sized for a GPU unless told otherwise: a CPU may take")
    check_sized_for_gpu("bench model", "cuda")
    assert capsys.readouterr().out == ""


def test_every_case_is_listed(bench: Bench) -> None:
    code, listed, _ = bench("list")
    assert code == 0
    for name in NAMES:
        assert get_case(name).name == name
        assert f"{name} " in listed
        assert configurations(get_case(name), quick=True)


@pytest.mark.parametrize("attention", ["naive", "sdpa", "vectorized_torch"])  # the planner does not know the last
@pytest.mark.parametrize("mode, copies", [("forward", 1), ("forward_backward", 2), ("train_step", 4)])
def test_a_model_too_large_for_a_cpu_is_an_oom_row_before_it_is_built(
    mode: str, copies: int, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: Any = dict(size="small", mode=mode, attention=attention, device="cpu", warmup=0, steps=1)
    weights = 4 * num_parameters(Workload(size="small", device="cpu").shape)
    monkeypatch.setattr(workload, "memory_bytes", lambda device: copies * weights - 1)
    monkeypatch.setattr(workload, "TransformerLM", None)  # it must not be built
    (row,) = case.CASE.measure([case.ModelBench(**fields)])
    assert row.status == "oom"
    assert row.error is not None
    assert row.error.startswith(f"size small, batch_size 4, context_length 256: {mode} needs about ")


def test_a_model_that_fits_a_cpu_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ("forward", "train_step"):
        config = Workload(size="quick", mode=mode, device="cpu")  # type: ignore[arg-type]
        least = config.least_bytes()
        monkeypatch.setattr(workload, "memory_bytes", lambda device, least=least: least)
        Workbench(config).step()


@pytest.mark.gpu
def test_out_of_memory_is_a_row_and_the_next_configuration_is_measured() -> None:
    configs = configurations(case.CASE, dict(QUICK, device=("cuda",), size=("quick",), mode=("forward",),
                             context_length=(16, 1 << 20), batch_size=(4,), steps=(2,)))  # fmt: skip
    rows = list(case.CASE.measure([configs[1], configs[0]]))
    assert [row.status for row in rows] == ["oom", "ok"]
    assert rows[0].metrics["requested_bytes"] > 1 << 30


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_configuration_twice_takes_the_same_time(precision: str) -> None:
    # Kernels longer than their launches even on a slow host, because the host's times vary more.
    size = "2.7B" if precision == "bf16" else "medium"
    config = case.ModelBench(size=size, mode="train_step", precision=precision, device="cuda", context_length=1024)
    first, second = (case.measure(config)[1]["step_ms"]["p50"] for _ in range(2))
    assert first == pytest.approx(second, rel=0.03)
