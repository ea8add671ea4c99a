"""The command: its trials, its files, its errors; and one real search."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_basics.data import load_tokens
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.cli.speedrun import command
from cs336_systems.cli.speedrun import run as speedrun_run
from cs336_systems.cli.speedrun.choice import SIZES, Trial
from cs336_systems.cli.train import parse_run_config
from cs336_systems.config.run import RunConfig
from tests.distributed import processes_of, wait_until

STORIES = ["--data.source", "stories", "--data.story_chars=10000", "--model.context_length", "32"]


class Machine:
    """Times trials without running them."""

    def __init__(self) -> None:
        self.trials, self.runs, self.broken = list[Trial](), list[RunConfig](), ""

    def step_s(self, trial: Trial) -> float:
        return 0.02 * trial.sequences * (1 + list(SIZES).index(trial.size))

    def time_trial(self, trial: Trial, run: RunConfig, device: str) -> Row:
        self.trials.append(trial)
        self.runs.append(run)
        fields: dict[str, Any] = dict(case="speedrun", variant=trial.size, config={}, env={})
        if self.broken and getattr(run.train, self.broken):
            return Row(**fields, status="error", error="no compiler")
        step_ms = {"p50": 1e3 * self.step_s(trial)}
        return Row(**fields, metrics={"step_ms": step_ms, "startup_s": 2.0, "peak_memory_bytes": 1})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(speedrun_run, "time_trial", machine.time_trial)
    return machine


def prepare(out: Path, *arguments: str) -> tuple[dict[str, Any], list[Sequence[str]]]:
    """Run the command without its training; return the configuration that it wrote and the arguments for training."""
    trained: list[Sequence[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "train", lambda words: trained.append(words) or 0)
        assert command.speedrun(["--out", str(out), *STORIES, *arguments]) == 0
    (file,) = out.glob("speedrun-*/speedrun.json")
    return json.loads(file.read_text()), trained


def test_it_writes_the_run_it_has_found_and_trains_it(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, trained = prepare(tmp_path, "--minutes", "0.2")
    (file,) = tmp_path.glob("speedrun-*/speedrun.json")
    assert trained == [["--config", str(file)]]
    assert json.loads(json.dumps(parse_run_config(trained[0])[0].to_dict())) == config
    train, model = config["train"], config["model"]
    best = machine.trials[-1]
    assert {name: model[name] for name in SIZES[best.size]} == SIZES[best.size]
    assert train["max_steps"] == pytest.approx((0.93 * 12 - 2) / machine.step_s(best), rel=0.1)
    assert train["max_minutes"] == pytest.approx(0.2, abs=0.01)
    assert (train["batch_size"], train["precision"], train["compile"]) == (best.sequences, "fp32", False)
    assert config["optimizer"]["lr"] == 3e-3
    assert config["data"]["data_dir"] == f"{tmp_path}/data/stories"
    assert Path(config["run_dir"]).parent == file.parent
    assert [row.variant for row in read_rows(file.parent / "rows.jsonl")] == [t.size for t in machine.trials]
    said = capsys.readouterr().out
    assert f"cs336 train --config {file}" in said
    assert f"cs336 generate {config['run_dir']}" in said


def test_a_trial_that_would_take_longer_than_the_search_may_is_not_begun(machine: Machine, tmp_path: Path) -> None:
    machine.step_s = lambda trial: 2.0 * trial.sequences  # type: ignore[method-assign]
    prepare(tmp_path, "--minutes", "10", "--train.device", "cpu")
    assert {trial.size for trial in machine.trials} == {"nano"}


def test_it_prints_the_reason_for_its_choice_but_no_expected_loss(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The law that compares sizes gives models this small 19 nats and more, where knowing nothing is 6.6."""
    prepare(tmp_path, "--minutes", "5")
    lines = capsys.readouterr().out.splitlines()
    (first,) = (i for i, line in enumerate(lines) if line.startswith("searching, "))  # above it stand paths
    assert "loss" not in " ".join(lines[first : lines.index("commands:")])
    timed = [line for line in lines if line.startswith("  nano ")]  # once for each batch
    assert timed
    assert all(re.search(r"would train on [\d.]+ M tokens, [\d.]+ a parameter$", line) for line in timed)
    (chosen,) = (line for line in lines if line.startswith("to train: "))
    best = machine.trials[-1]
    assert chosen.startswith(f"to train: {best.size}, auto, {best.sequences} x 32 tokens a step, because ")


def test_given_fields_override_chosen_ones(machine: Machine, tmp_path: Path) -> None:
    given = ["--train.seed", "7", "--optimizer.lr=0.5", "--model.vocab_size", "300", "--model.attention", "naive"]
    config, trained = prepare(tmp_path, "--size", "micro", "--dry_run", *given)
    assert trained == []
    assert config["train"]["seed"] == 7
    assert config["optimizer"]["lr"] == 0.5
    assert config["model"]["vocab_size"] == 300
    assert config["model"]["context_length"] == 32
    assert {trial.size for trial in machine.trials} == {"micro"}
    assert {run.model.attention for run in machine.runs} == {"naive"}


def test_an_architecture_of_ones_own(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "given", {})  # for the machine's times
    shape = {"d_model": 64, "d_ff": 96, "num_layers": 3, "num_heads": 2}
    config, _ = prepare(tmp_path, *(f"--model.{name}={value}" for name, value in shape.items()))
    assert {name: config["model"][name] for name in shape} == shape


def test_passes_over_the_text_instead_of_minutes(machine: Machine, tmp_path: Path) -> None:
    config, _ = prepare(tmp_path, "--epochs", "3")
    tokens = config["train"]["max_steps"] * config["train"]["batch_size"] * 32
    text = len(load_tokens(tmp_path / "data" / "stories" / "train.npy", 768))
    assert 3 * text <= tokens < 3 * text + config["train"]["batch_size"] * 32
    assert config["train"]["max_minutes"] is None
    assert {trial.size for trial in machine.trials} == {"nano"}


def test_a_short_text_is_read_sixteen_times_at_most(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = prepare(tmp_path / "stories", "--minutes", "100")
    text = len(load_tokens(tmp_path / "stories" / "data" / "stories" / "train.npy", 768))
    tokens = config["train"]["max_steps"] * config["train"]["batch_size"] * 32
    assert tokens == pytest.approx(16 * text, abs=config["train"]["batch_size"] * 32)
    assert "a longer text would be worth more" in capsys.readouterr().out
    few = ["--data.source", "random", "--data.random_tokens", "100", "--model.vocab_size", "300"]
    config, _ = prepare(tmp_path / "few", "--minutes", "100", *few)
    assert config["train"]["max_steps"] < 10


def test_several_processes_and_their_command(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = prepare(tmp_path, "--devices", "2")
    assert (config["parallel"]["devices"], config["parallel"]["strategy"]) == (2, "auto")
    assert config["train"]["batch_size"] == 2 * machine.trials[-1].sequences
    assert "torchrun --nproc-per-node 2 -m cs336_systems train --config" in capsys.readouterr().out


def test_a_gpu_is_not_chosen_by_its_number(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedrun_run, "select_device", torch.device)
    with pytest.raises(ValueError, match=r"^train\.device is 'cuda:1': it must be auto, cpu or cuda"):
        prepare(tmp_path, "--train.device", "cuda:1")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that there is a GPU of 15 GiB."""
    for name, value in (
        ("select_device", lambda name: torch.device("cuda")),
        ("check_devices", lambda *_: None),
        ("check_precision", lambda *_: None),
        ("gpu_count", lambda: 1),
        ("gpu_name", lambda: "T4"),
        ("memory_bytes", lambda device: 15 << 30),
    ):
        monkeypatch.setattr(speedrun_run, name, value)


@pytest.mark.usefixtures("card")
def test_a_card_without_bfloat16_trains_in_float16(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_precision(device: torch.device, precision: str) -> None:
        raise ValueError(f"no {precision}")

    monkeypatch.setattr(speedrun_run, "check_precision", check_precision)
    config, _ = prepare(tmp_path, "--size", "small", "--epochs", "10000")
    train = config["train"]
    assert (train["precision"], train["compile"], train["cuda_graph"]) == ("fp16", True, True)
    assert {trial.kernel for trial in machine.trials} == {"auto", "flash_triton"}
    assert train["gradient_accumulation_steps"] > 1, "more than fits into 15 GiB"


@pytest.mark.usefixtures("card")
def test_several_gpus_are_given_no_more_than_fits_and_an_unknown_configuration_is_reported_once(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, strategy in (("auto", []), ("flashddp", ["--parallel.strategy", "flashddp"])):
        config, _ = prepare(tmp_path / name, "--devices", "2", "--size", "small", "--epochs", "10000", *strategy)
        assert config["train"]["gradient_accumulation_steps"] > 1, "more than fits into 15 GiB"
    assert "is found by trying" not in caplog.text
    prepare(tmp_path / "unknown", "--devices", "2", "--size", "nano", "--parallel.nccl_max_ctas", "4")
    reason = "no prediction for a limited number of NCCL's thread blocks"
    assert caplog.messages.count(f"how much fits into memory is found by trying: {reason}") == 1


@pytest.mark.usefixtures("card")
def test_a_machine_without_a_compiler_goes_on_without(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.broken = "compile"
    config, _ = prepare(tmp_path, "--size", "nano")
    train = config["train"]
    assert (train["precision"], train["compile"], train["cuda_graph"]) == ("bf16", False, False)
    assert sum(run.train.compile for run in machine.runs) == 2, "with a graph and without, and then no more"
    assert "error no compiler" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--minutes", "0"], "minutes is 0"),
        (["--minutes", "nan"], "minutes is nan"),
        (["--minutes", "x"], "minutes is x: it must be a finite number"),
        (["--epochs", "-1"], "epochs is -1"),
        (["--minutes", "1", "--epochs", "1"], "epochs is 1.0: it must be left out where minutes is given"),
        (["--size", "huge"], "size is 'huge': it must be one of nano, micro"),
        (
            ["--size", "nano", "--model.d_model", "64"],
            "size is 'nano': it must be left out where model.d_model is given",
        ),
        (["--model.d_model", "64"], "model.d_ff is missing"),
        (["--parallel.devices=2"], "parallel.devices is given: it must be left out"),
        (["--train.batch_size", "8"], "train.batch_size is given: it must be left out"),
        (["--train.max_steps=2"], "train.max_steps is given: it must be left out"),
        (["--model.attention", "foo"], "model.attention is 'foo'"),
        (["--config", "configs/demo.json"], "config is given: it must be left out"),
        (["--out", ""], "out is ''"),
        (["--out", "/proc/x"], "out is '/proc/x': it must be a folder that can be written"),
        (["--devices", "0"], "devices is 0: it must be at least 1"),
        (["--devices", "100000"], "devices is 100000: it must be at most"),
        (["--minute", "3"], "unknown field minute: did you mean minutes?"),
        (["--train.max_step", "3"], "unknown field train.max_step: did you mean train.max_steps?"),
        (["--train.device", "cuda:99"], "train.device is 'cuda:99'"),
        (["--minutes", "0.01"], "minutes is 0.01: timing took .* it must be at least"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(machine: Machine, tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        prepare(tmp_path, *arguments)
    assert not list(tmp_path.glob("*/speedrun.json"))


def test_a_search_on_two_processes_of_a_cpu(tmp_path: Path) -> None:
    """A run that is trained to its end is the notebook's, in tests/test_notebooks.py."""
    words = ["--epochs", "1", "--devices", "2", "--train.device", "cpu", "--dry_run", "--out", str(tmp_path)]
    assert command.speedrun([*words, *STORIES, "--data.documents", "true"]) == 0
    (folder,) = tmp_path.glob("speedrun-*")
    (row,) = read_rows(folder / "rows.jsonl")
    assert (row.variant, row.status) == ("nano, auto", "ok")
    assert row.metrics["step_ms"]["p50"] > 0
    config = json.loads((folder / "speedrun.json").read_text())
    assert json.loads(row.config["run"])["train"]["batch_size"] == config["train"]["batch_size"]
    assert not (folder / "run").exists()


@pytest.mark.slow  # how a signal ends a command's processes: tests/training/test_launch.py, tests/bench/test_runner.py
def test_an_interrupt_ends_the_search_and_its_processes(tmp_path: Path) -> None:
    """During a trial that would take the better part of a minute."""
    words = ["--size", "small", "--minutes", "100", "--train.device", "cpu", "--dry_run", "--out", str(tmp_path)]
    stories = ["--data.source", "stories", "--data.story_chars", "40000"]
    command = [sys.executable, "-m", "cs336_systems", "speedrun", *words, *stories]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    environ = os.environ | {"TMPDIR": str(tmp_path)}  # so that it is in the command line of the worker
    with subprocess.Popen(command, env=environ, start_new_session=True, **pipes) as process:
        wait_until(
            lambda: any("cs336_systems.bench.ranks:measure_one_rank" in words for words in processes_of(str(tmp_path))),
            process,
        )
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=15)
    assert (process.returncode, err) == (130, "cs336: interrupted\n")
    wait_until(lambda: not processes_of(str(tmp_path)), timeout_s=10)
