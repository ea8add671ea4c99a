"""A run ends with the same bits however often it was stopped."""

import dataclasses
import math
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.config.run import RunConfig
from cs336_systems.training import train
from cs336_systems.training.batches import BatchLoader
from cs336_systems.training.loop import NonFiniteError, StartedStep, Trainer
from cs336_systems.training.manifest import checkpoint_name, verify_checkpoint
from cs336_systems.training.metrics import METRICS_FILE, read_metrics

from .helpers import (
    Killed,
    assert_same_tensors,
    checkpoint_names,
    checkpoint_path,
    loss_rows,
    make_config,
    run_train,
    warnings_of,
)
from .runs import (
    EVERY_FIVE,
    assert_same_end,
    copy_of,
    end_of,
    resumed,
    run_dir,
    stop_after,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# Five and five steps are ten


def run_in_process(config: RunConfig) -> None:
    train(config)


def run_in_a_new_process(config: RunConfig) -> None:
    done = run_train(config, timeout=300)
    assert done.returncode == 0, done.stderr


def check_that_five_and_five_are_ten(config: RunConfig, run: Callable[[RunConfig], None]) -> None:
    run(config)
    uninterrupted = end_of(config)
    assert {name.split(".")[0] for name in uninterrupted.tensors} == {"model", "optimizer", "rng"}
    assert uninterrupted.sequences == 10 * config.train.batch_size
    assert [row["step"] for row in uninterrupted.losses] == list(range(1, 11))

    shutil.rmtree(checkpoint_path(config, 10))
    run(resumed(config))
    assert_same_end(end_of(config), uninterrupted)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "implementation, precision",
    [("own", "fp32"), ("torch_fused", "fp32"), ("torch_foreach", "fp32"), ("fused", "bf16")],
)
def test_five_and_five_resumed_steps_are_ten_bit_for_bit(
    tmp_path: Path, implementation: str, accumulation: int, precision: str
) -> None:
    config = make_config(
        tmp_path,
        optimizer=dict(implementation=implementation),
        train=dict(gradient_accumulation_steps=accumulation, precision=precision),
        checkpoint=EVERY_FIVE,
    )
    check_that_five_and_five_are_ten(config, run_in_process)


def test_five_and_five_steps_are_ten_in_a_new_process_each(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(gradient_accumulation_steps=2), checkpoint=EVERY_FIVE)
    run_in_process(config)
    uninterrupted = end_of(config)
    shutil.rmtree(checkpoint_path(config, 10))
    done = run_train(resumed(config))
    assert done.returncode == 0, done.stderr
    assert_same_end(end_of(config), uninterrupted)
    # Without a terminal, the progress is plain lines.
    assert "\x1b" not in done.stdout
    assert any(line.startswith("step 10/10") and "valid" in line for line in done.stdout.splitlines())
    assert f"resume: from {checkpoint_path(config, 5)}, step 5" in done.stdout
    assert done.stderr == ""


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "implementation, precision",
    [("own", "fp32"), ("torch_fused", "fp32"), ("torch_foreach", "fp32"), ("fused", "bf16")],
)
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_five_and_five_resumed_steps_are_ten_bit_for_bit_on_a_gpu(
    tmp_path: Path, compile: bool, implementation: str, precision: str, accumulation: int
) -> None:
    config = make_config(
        tmp_path,
        optimizer=dict(implementation=implementation),
        train=dict(
            device="cuda",
            precision=precision,
            deterministic=True,
            compile=compile,
            gradient_accumulation_steps=accumulation,
        ),
        checkpoint=EVERY_FIVE,
    )
    # New processes, because deterministic algorithms are a setting of the whole process.
    check_that_five_and_five_are_ten(config, run_in_a_new_process)


def test_the_settings_of_a_deterministic_run_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch._inductor.config.deterministic

    found, start_step = list[tuple[bool, bool]](), Trainer.start_step
    monkeypatch.setattr(Trainer, "start_step", lambda *given: (found.append(settings()), start_step(*given))[1])
    train(make_config(tmp_path, train=dict(deterministic=True, max_steps=1)))
    assert (found, settings()) == ([(True, True)], (False, False))


@pytest.mark.parametrize(
    "train",
    [
        dict(device="cpu"),
        pytest.param(dict(device="cuda", precision="bf16", deterministic=True), marks=pytest.mark.gpu),
        pytest.param(dict(device="cuda", precision="bf16", deterministic=True, cuda_graph=True), marks=pytest.mark.gpu),
    ],
    ids=["cpu", "gpu", "recorded"],
)
def test_five_and_five_steps_are_ten_where_they_are_saved_in_the_background(
    tmp_path: Path, train: dict[str, Any]
) -> None:
    background = dict(checkpointing_interval=1, async_save=True)  # a save under way in every step, also when recorded
    optimizer = dict(implementation="torch_fused")
    config = make_config(tmp_path, optimizer=optimizer, train=train, checkpoint=background)
    run = run_in_a_new_process if config.train.deterministic else run_in_process
    run(config)
    uninterrupted = end_of(config)
    for step in range(6, 11):
        shutil.rmtree(checkpoint_path(config, step))
    run(resumed(config))
    assert_same_end(end_of(config), uninterrupted)

    foreground = make_config(tmp_path, "foreground", optimizer=optimizer, train=train, checkpoint=EVERY_FIVE)
    run(foreground)
    assert_same_end(end_of(foreground), uninterrupted)


def test_the_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(precision="fp16"), checkpoint=EVERY_FIVE)
    check_that_five_and_five_are_ten(config, run_in_process)
    trainer = end_of(config).trainer
    assert trainer["scaler"]["_growth_tracker"] == 10 - trainer["skipped_steps"]


def test_a_run_whose_validation_is_nan_ends_with_its_result_and_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finish = Trainer.finish_step

    def broken(trainer: Trainer, started: StartedStep) -> dict[str, Any]:
        row = finish(trainer, started)
        with torch.no_grad():
            trainer.model.ln_final.weight[0] = math.nan
        return row

    monkeypatch.setattr(Trainer, "finish_step", broken)
    config = make_config(tmp_path, train=dict(max_steps=1), data=dict(source="stories"))
    result = train(config)
    assert (result.sample, result.valid_loss) == (None, None)
    assert (run_dir(config) / "result.json").exists()
    assert Path(result.loss_curve).exists()
    assert any("sample: none, because the model's logits are not finite" in text for text in warnings_of(caplog))


def test_skipped_steps_are_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 and 8 see a loss that is not finite, in both ways through the run."""
    start, finish = Trainer.start_step, Trainer.finish_step

    def poisoned(trainer: Trainer, stop: Any) -> StartedStep:
        if trainer.position.step + 1 not in (3, 8):
            return start(trainer, stop)
        weight = trainer.model.ln_final.weight
        kept = weight[0].item()
        with torch.no_grad():
            weight[0] = math.nan
        started = start(trainer, stop)
        with torch.no_grad():
            weight[0] = kept
        return started

    def comparable(trainer: Trainer, started: StartedStep) -> dict[str, Any]:
        row = finish(trainer, started)
        return row | ({"loss": 0.0, "grad_norm": 0.0} if math.isnan(row["loss"]) else {})  # NaN equals nothing

    monkeypatch.setattr(Trainer, "start_step", poisoned)
    monkeypatch.setattr(Trainer, "finish_step", comparable)
    config = make_config(tmp_path, train=dict(skip_nonfinite=True), checkpoint=EVERY_FIVE)
    check_that_five_and_five_are_ten(config, run_in_process)
    assert [row["skipped_steps"] for row in loss_rows(config)] == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]


def test_random_numbers_drawn_in_training_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Trainer.start_step

    def noisy(trainer: Trainer, stop: Any) -> StartedStep:
        with torch.no_grad():
            trainer.model.ln_final.weight.add_(torch.randn(32) * 1e-3)  # as dropout would draw
        return start(trainer, stop)

    monkeypatch.setattr(Trainer, "start_step", noisy)
    check_that_five_and_five_are_ten(make_config(tmp_path, checkpoint=EVERY_FIVE), run_in_process)


def test_a_run_can_be_resumed_after_every_step(tmp_path: Path, finished: RunConfig) -> None:
    config = make_config(tmp_path, train=dict(max_steps=10), checkpoint=dict(checkpointing_interval=1))
    config = dataclasses.replace(config, data=finished.data)
    train(config)
    for step in range(9, 0, -1):
        shutil.rmtree(checkpoint_path(config, step + 1))
        for later in range(step + 2, 11):
            shutil.rmtree(checkpoint_path(config, later), ignore_errors=True)
        if step % 3 == 0:
            train(resumed(config))
            assert_same_end(end_of(config), end_of(finished))


def test_a_run_goes_on_from_another_runs_checkpoint_in_a_folder_of_its_own(tmp_path: Path, finished: RunConfig) -> None:
    elsewhere = resumed(finished, checkpoint_path(finished, 5), run_dir=str(tmp_path / "elsewhere"))
    train(elsewhere)
    assert_same_tensors(end_of(elsewhere).tensors, end_of(finished).tensors)
    assert [row["step"] for row in loss_rows(elsewhere)] == [6, 7, 8, 9, 10]
    assert loss_rows(elsewhere) == loss_rows(finished)[5:]


def test_after_a_resume_each_step_is_in_the_metrics_once(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    before = (run_dir(config) / METRICS_FILE).read_text()
    (run_dir(config) / METRICS_FILE).write_text(before + '{"step": 11, "lo')  # as a crash leaves it
    for _ in range(2):
        shutil.rmtree(checkpoint_path(config, 10))
        train(resumed(config))
        rows = read_metrics(run_dir(config) / METRICS_FILE)
        assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11))
        assert [row["step"] for row in rows if "valid_loss" in row] == [4, 8, 10]


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    result = train(resumed(config))
    assert result.step == 10
    assert_same_end(end_of(config), end_of(finished))
    # It is a copy, whose result.json names the other folder.
    folder = run_dir(config)
    assert (result.run_dir, result.checkpoint) == (str(folder), str(checkpoint_path(config, 10)))
    assert Path(result.loss_curve).parent == folder


# The end of a run in other ways


def test_a_run_that_stops_on_a_loss_that_is_not_finite_keeps_its_checkpoint_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Trainer.start_step

    def poisoned(trainer: Trainer, stop: Any) -> StartedStep:
        if trainer.position.step == 6:
            with torch.no_grad():
                trainer.model.ln_final.weight[0] = math.inf
        return start(trainer, stop)

    monkeypatch.setattr(Trainer, "start_step", poisoned)
    config = make_config(tmp_path, checkpoint=EVERY_FIVE)
    threads = threading.active_count()
    with pytest.raises(NonFiniteError, match=r"step 7: .*sequences 24 to 27"):
        train(config)
    assert threading.active_count() == threads
    assert checkpoint_names(config) == [checkpoint_name(5)]
    verify_checkpoint(checkpoint_path(config, 5))
    assert [row["step"] for row in loss_rows(config)] == list(range(1, 7))

    monkeypatch.undo()
    train(resumed(config))  # the cause was taken away
    assert [row["step"] for row in loss_rows(config)] == list(range(1, 11))


def test_an_error_in_the_loaders_thread_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = BatchLoader._prepare

    def failing(loader: BatchLoader, first: int, count: int) -> Any:
        if first >= 12:
            raise OSError(5, "Input/output error")
        return prepare(loader, first, count)

    monkeypatch.setattr(BatchLoader, "_prepare", failing)
    config = make_config(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        train(config)
    assert [row["step"] for row in loss_rows(config)] == [1, 2, 3]


def test_a_run_stopped_from_python_says_so_and_goes_on_to_the_same_end(tmp_path: Path, finished: RunConfig) -> None:
    config = dataclasses.replace(finished, run_dir=str(tmp_path / "run"), checkpoint=make_config(tmp_path).checkpoint)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    result = stop_after(6, lambda: train(config))
    assert (result.step, result.interrupted, result.sample) == (6, "SIGTERM", None)
    six = make_config(tmp_path, run="six", train=dict(validation_interval=6))
    train(dataclasses.replace(six, data=finished.data))
    validation = next(row for row in end_of(six).validations if row["step"] == 6)
    assert read_metrics(run_dir(config) / METRICS_FILE)[-1] == validation
    assert result.valid_loss == validation["valid_loss"]
    assert checkpoint_names(config) == [checkpoint_name(6)]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    train(resumed(config))
    end = end_of(config)
    end.validations.remove(validation)
    assert_same_end(end, end_of(finished))


def test_an_interrupted_run_saves_before_it_validates_since_it_may_be_killed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> float:
        raise Killed

    monkeypatch.setattr(Trainer, "evaluate", killed)
    config = make_config(tmp_path, train=dict(validation_interval=0))
    with pytest.raises(Killed):
        stop_after(6, lambda: train(config))
    assert verify_checkpoint(checkpoint_path(config, 6)).step == 6


def test_a_signal_during_the_last_step_is_no_interruption(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    result = stop_after(10, lambda: train(config))
    assert (result.step, result.interrupted) == (10, None)
    assert result.valid_loss is not None


def test_a_run_whose_time_is_up_ends_like_a_finished_one_and_can_go_on(tmp_path: Path, finished: RunConfig) -> None:
    short = dataclasses.replace(finished.train, max_minutes=1e-9)
    config = dataclasses.replace(finished, run_dir=str(tmp_path / "run"), train=short)
    result = train(config)
    assert (result.step, result.interrupted) == (1, None)
    assert result.valid_loss is not None
    assert checkpoint_names(config) == [checkpoint_name(1)]
    train(resumed(config, train=finished.train))
    assert_same_tensors(end_of(config).tensors, end_of(finished).tensors)
    assert loss_rows(config) == loss_rows(finished)
