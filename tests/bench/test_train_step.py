"""The step's measurement, on a model that a CPU times in a moment."""

import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.bench import train_step
from cs336_systems.bench.train_step import main, measure, step_config
from cs336_systems.config import ModelConfig


@pytest.mark.parametrize("variant", ["cs336", "hf_llama"])
def test_a_row_says_what_ran_and_its_rates_follow_from_its_time(variant: str) -> None:
    model = ModelConfig(vocab_size=300, context_length=16, d_model=32, d_ff=64, num_layers=1, num_heads=2)
    config = step_config(model, batch_size=2, device="cpu", max_steps=100)
    row = measure(config, variant, warmup=1, steps=4)
    assert (row.case, row.variant, row.status) == ("train-step", variant, "ok")
    assert row.config == config.to_dict()
    mean = row.metrics["step_ms"]["mean"]
    assert 0 < mean < 1e3 * row.metrics["startup_s"]
    assert row.metrics["tokens_per_s"] == pytest.approx(2 * 16 / (mean / 1e3))
    assert row.metrics["mfu"] is None  # a CPU's peak is not known


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["train_step", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.mark.parametrize(
    "wrong, message",
    [
        (["--sizes", "small", "huge"], "model.size is 'huge'"),
        (["--batch_size", "0"], "train.batch_size is 0"),
        (["--device", "tpu"], "train.device is 'tpu'"),
        (["--out", "."], "out is '.'"),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_measured(
    wrong: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_step.subprocess, "run", None)
    assert run_main(monkeypatch, "--device", "cpu", *wrong) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("codes, expected", [([0, 0], 0), ([1, 0], 1), ([0, 2], 1)])
def test_a_failed_measurement_is_exit_code_1_and_the_others_go_on(
    codes: list[int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], env: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "rows.jsonl").write_text('{"metrics": {}}\n')
        return subprocess.CompletedProcess(command, left.pop(0))

    left = list(codes)
    monkeypatch.setattr(train_step.subprocess, "run", run)
    options = ["--sizes", "small", "--variants", "cs336", "hf_llama", "--device", "cpu"]
    assert run_main(monkeypatch, *options, "--out", str(tmp_path / "rows.jsonl")) == expected
    assert not left
