"""A run ends with the same bits however often it was stopped, and refuses clearly."""

import dataclasses
import fcntl
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import torch
from torch import Tensor

from cs336_basics.tokenizer import Tokenizer
from cs336_systems.cli import load_config
from cs336_systems.cli.train import parse_run_config
from cs336_systems.config.run import RunConfig
from cs336_systems.training import RunResult, train
from cs336_systems.training.batches import BatchLoader
from cs336_systems.training.folder import LOCK
from cs336_systems.training.loop import NonFiniteError, Trainer
from cs336_systems.training.manifest import MANIFEST, checkpoint_name, find_checkpoints, verify_checkpoint
from cs336_systems.training.metrics import METRICS_FILE, read_metrics
from cs336_systems.training.prepare import prepare_data
from tests.distributed import wait_until

from .helpers import (
    DAMAGE,
    TENSOR_DAMAGE,
    Killed,
    assert_same_tensors,
    checkpoint_names,
    checkpoint_path,
    forge_manifest,
    has_rows,
    loss_rows,
    make_config,
    read_independently,
    run_train,
    running_train,
    tensor_file,
    warnings_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY_FIVE = dict(checkpointing_interval=5)
# The rest of them in test_checkpoint.py.
SOME_DAMAGE = [
    "no tensor file",
    "half a tensor file",
    "a byte flipped",
    "no manifest",
    "half a manifest",
    "manifest of another format",
    "manifest whose files have no size",
    "nonsense: trainer scaler",
    "nonsense: files",
]


def resumed(config: RunConfig, resume: str | Path = "auto", **changes: Any) -> RunConfig:
    return dataclasses.replace(config, resume=str(resume), **changes)


def run_dir(config: RunConfig) -> Path:
    return Path(str(config.run_dir))


def without_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs336_systems.training.run.plot_loss_curves", lambda *_: None)


@pytest.fixture
def drawn() -> None:
    """Asks for the loss curve to be drawn."""


@pytest.fixture(autouse=True)
def fast_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than training these models: only the tests of a run's files do it."""
    if "drawn" not in request.fixturenames:
        without_plot(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of ten steps with checkpoints 5 and 10. Not to be written to: `copy_of` makes one that may be."""
    config = make_config(tmp_path_factory.mktemp("finished"), checkpoint=EVERY_FIVE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config)
    torch.set_num_threads(threads)
    return config


def copy_of(finished: RunConfig, tmp_path: Path) -> RunConfig:
    shutil.copytree(str(finished.run_dir), tmp_path / "run")
    return dataclasses.replace(finished, run_dir=str(tmp_path / "run"))


# Five and five steps are ten


@dataclasses.dataclass
class End:
    """All that a run comes to."""

    tensors: dict[str, Tensor]
    sequences: int
    trainer: dict[str, Any]
    losses: list[dict[str, Any]]
    validations: list[dict[str, Any]]


def end_of(config: RunConfig, step: int = 10) -> End:
    path = checkpoint_path(config, step)
    manifest = verify_checkpoint(path)
    rows = read_metrics(run_dir(config) / METRICS_FILE)
    validations = [row for row in rows if "valid_loss" in row]
    return End(read_independently(path), manifest.sequences, manifest.trainer, loss_rows(config), validations)


def assert_same_end(one: End, other: End) -> None:
    assert_same_tensors(one.tensors, other.tensors)
    for name in ("sequences", "trainer", "losses", "validations"):
        assert getattr(one, name) == getattr(other, name), name


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("implementation", ["own", "torch_fused", "torch_foreach"])
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
@pytest.mark.parametrize("implementation", ["own", "torch_fused", "torch_foreach"])
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_five_and_five_resumed_steps_are_ten_bit_for_bit_on_a_gpu(
    tmp_path: Path, compile: bool, implementation: str, accumulation: int
) -> None:
    config = make_config(
        tmp_path,
        optimizer=dict(implementation=implementation),
        train=dict(
            device="cuda",
            precision="bf16",
            deterministic=True,
            compile=compile,
            gradient_accumulation_steps=accumulation,
        ),
        checkpoint=EVERY_FIVE,
    )
    # New processes, because deterministic algorithms are a setting of the whole process.
    check_that_five_and_five_are_ten(config, run_in_a_new_process)


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


def test_skipped_steps_are_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 and 8 see a loss that is not finite, in both ways through the run."""
    step = Trainer.train_step

    def poisoned(trainer: Trainer, *_: Any) -> dict[str, Any]:
        if trainer.position.step + 1 not in (3, 8):
            return step(trainer)
        weight = trainer.model.ln_final.weight
        kept = weight[0].item()
        with torch.no_grad():
            weight[0] = math.nan
        row = step(trainer)
        with torch.no_grad():
            weight[0] = kept
        return {**row, "loss": 0.0, "grad_norm": 0.0}  # NaN equals nothing, not even itself

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    config = make_config(tmp_path, train=dict(skip_nonfinite=True), checkpoint=EVERY_FIVE)
    check_that_five_and_five_are_ten(config, run_in_process)
    assert [row["skipped_steps"] for row in loss_rows(config)] == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2]


def test_random_numbers_drawn_in_training_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def noisy(trainer: Trainer, *_: Any) -> dict[str, Any]:
        with torch.no_grad():
            trainer.model.ln_final.weight.add_(torch.randn(32) * 1e-3)  # as dropout would draw
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", noisy)
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


# Torn checkpoints


@pytest.mark.parametrize("damage", SOME_DAMAGE)
def test_resume_auto_passes_over_a_torn_checkpoint_loudly_and_ends_the_same(
    tmp_path: Path, finished: RunConfig, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    config = copy_of(finished, tmp_path)
    file = tensor_file(checkpoint_path(config, 10)).name if damage in TENSOR_DAMAGE else MANIFEST
    DAMAGE[damage](checkpoint_path(config, 10))
    train(resumed(config))
    passed_over, set_aside = warnings_of(caplog)
    assert str(checkpoint_path(config, 10)) in passed_over
    assert file in passed_over
    assert f"{checkpoint_path(config, 10)} is set aside as superseded-step_00000010" in set_aside
    assert_same_end(end_of(config), end_of(finished))


@pytest.mark.parametrize("damage", SOME_DAMAGE)
def test_resume_path_refuses_a_torn_checkpoint_by_name(tmp_path: Path, finished: RunConfig, damage: str) -> None:
    config = copy_of(finished, tmp_path)
    path = checkpoint_path(config, 5)
    file = tensor_file(path).name if damage in TENSOR_DAMAGE else MANIFEST
    DAMAGE[damage](path)
    with pytest.raises(ValueError, match=str(path)) as caught:
        train(resumed(config, path))
    assert file in str(caught.value)


@pytest.mark.parametrize("torn", [True, False], ids=["all torn", "none there"])
def test_resume_auto_starts_from_the_beginning_where_nothing_is_whole_and_says_so(
    tmp_path: Path, finished: RunConfig, caplog: pytest.LogCaptureFixture, torn: bool
) -> None:
    caplog.set_level(logging.INFO, "cs336_systems")
    if torn:
        config = copy_of(finished, tmp_path)
        for step in (5, 10):
            DAMAGE["half a tensor file"](checkpoint_path(config, step))
    else:
        config = dataclasses.replace(finished, run_dir=str(tmp_path / "run"))
    train(resumed(config))
    assert len(warnings_of(caplog)) == (4 if torn else 0)  # passed over and set aside, each of two
    assert "no whole checkpoint" in caplog.text
    assert "starting from the beginning" in caplog.text
    assert_same_end(end_of(config), end_of(finished))
    verify_checkpoint(checkpoint_path(config, 5))


def test_a_checkpoint_without_all_that_a_run_goes_on_from_is_one_line(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(precision="fp16"))
    train(config)
    forge_manifest(checkpoint_path(config, 10), lambda manifest: manifest["trainer"]["scaler"].pop("growth_factor"))
    longer = dataclasses.replace(config.train, max_steps=12)
    with pytest.raises(ValueError, match=r"step_00000010 .*no 'growth_factor'"):
        train(resumed(config, train=longer))


# The schedule of a longer run

FINAL, AT_11 = 1e-3, 1e-3 + 0.5 * 9e-3 * (1 + math.cos(math.pi * 8 / 17))  # cosines to steps 10 and 20, after step 3


@pytest.mark.parametrize(
    "train_fields, optimizer, rate, said",
    [
        (dict(max_steps=20), {}, AT_11, "train.max_steps is 20, not 10; .* --optimizer.cosine_steps 10$"),
        (
            dict(max_steps=12),
            dict(lr=2e-2, min_lr=2e-3, cosine_steps=10),
            2e-3,
            r"lr is 0.02, not 0.01 and optimizer.min_lr is 0.002, not 0.001; .* --optimizer.lr 0.01 --optimizer.min_lr",
        ),
        (dict(max_steps=20), dict(cosine_steps=10), FINAL, ""),
        (dict(max_steps=20, batch_size=8), dict(cosine_steps=10, weight_decay=0.0), FINAL, ""),
    ],
    ids=["longer", "higher", "as it was", "other fields"],
)
def test_a_resume_tells_of_another_learning_rate_and_how_to_keep_it(
    tmp_path: Path,
    finished: RunConfig,
    caplog: pytest.LogCaptureFixture,
    train_fields: dict[str, Any],
    optimizer: dict[str, Any],
    rate: float,
    said: str,
) -> None:
    config = copy_of(finished, tmp_path)
    changed = dict(
        train=dataclasses.replace(config.train, **train_fields),
        optimizer=dataclasses.replace(config.optimizer, **optimizer),
    )
    train(resumed(config, **changed))
    assert loss_rows(config)[10]["lr"] == pytest.approx(rate, rel=1e-6)
    warnings = warnings_of(caplog)
    assert len(warnings) == bool(said)
    if said:
        assert f"step 11 has a learning rate of {rate:.3g} instead of {FINAL:.3g}, because" in warnings[0]
        assert re.search(said, warnings[0]), warnings[0]


def test_a_resume_in_the_warm_up_tells_from_which_step_on_the_rate_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = dict(warmup_steps=5)
    stop_after(2, lambda: train(make_config(tmp_path, optimizer=optimizer)))
    train(make_config(tmp_path, resume="auto", optimizer=optimizer, train=dict(max_steps=12)))
    told = [warning for warning in warnings_of(caplog) if "learning rate" in warning]
    assert len(told) == 1
    assert "step 6 has a learning rate of" in told[0], told[0]  # the first after the warm-up
    assert "train.max_steps is 12, not 10" in told[0]


def test_a_torn_checkpoint_of_the_last_step_is_replaced(tmp_path: Path, finished: RunConfig) -> None:
    config = dataclasses.replace(copy_of(finished, tmp_path), checkpoint=make_config(tmp_path).checkpoint)
    assert config.checkpoint.checkpointing_interval == 0
    DAMAGE["half a tensor file"](checkpoint_path(config, 10))
    result = train(resumed(config))
    assert result.checkpoint == str(checkpoint_path(config, 10))
    assert_same_end(end_of(config), end_of(finished))


def test_torn_checkpoints_do_not_count_among_those_that_are_kept(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    keep_one = make_config(tmp_path, checkpoint=dict(checkpointing_interval=3, keep_last=1)).checkpoint
    DAMAGE["half a tensor file"](checkpoint_path(config, 10))
    stopped = stop_after(8, lambda: train(resumed(config, checkpoint=keep_one)))
    assert stopped.step == 8
    assert Path(stopped.checkpoint).is_dir(), f"{stopped.checkpoint} was saved and deleted again"
    verify_checkpoint(Path(stopped.checkpoint))
    train(resumed(config, checkpoint=keep_one))
    assert_same_end(end_of(config), end_of(finished))


def test_a_new_checkpoint_is_kept_although_an_older_try_was_further(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    keep_one = make_config(tmp_path, checkpoint=dict(keep_last=1)).checkpoint
    from_five = resumed(config, checkpoint_path(config, 5), checkpoint=keep_one)
    stopped = stop_after(7, lambda: train(from_five))
    assert stopped.checkpoint == str(checkpoint_path(config, 7))
    assert Path(stopped.checkpoint).is_dir(), f"{stopped.checkpoint} was saved and deleted again"
    assert verify_checkpoint(Path(stopped.checkpoint)).step == 7


def stop_after(step: int, run: Callable[[], RunResult]) -> RunResult:
    """Run, with a SIGTERM to this process during that step."""
    train_step = Trainer.train_step

    def stopping(trainer: Trainer, *_: Any) -> dict[str, Any]:
        row = train_step(trainer)
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", stopping)
        return run()


# Checkpoints of another run


@pytest.mark.parametrize(
    "change, fields",
    [
        (dict(model=dict(d_model=64)), ["model.d_model is 64 here and 32 there"]),
        (dict(model=dict(num_layers=2, d_ff=32)), ["model.num_layers", "model.d_ff"]),
        (dict(model=dict(rope_theta=5000.0)), ["model.rope_theta"]),
        (dict(train=dict(seed=1)), ["train.seed is 1 here and 0 there"]),
        (dict(data=dict(seed=1)), ["training tokens", "data.seed is 1 here and 0 there"]),
        (dict(train=dict(seed=3), data=dict(random_tokens=6000)), ["train.seed", "data.random_tokens is 6000 here"]),
    ],
    ids=["width", "depth", "rope", "seed", "data", "seed and data"],
)
@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_checkpoint_of_another_run_is_refused_by_the_fields_that_differ(
    tmp_path: Path, finished: RunConfig, change: dict[str, Any], fields: list[str], resume: str
) -> None:
    config = copy_of(finished, tmp_path)
    other = make_config(tmp_path, resume="auto" if resume == "auto" else str(checkpoint_path(config, 5)), **change)
    with pytest.raises(ValueError, match="of another run") as caught:
        train(other)
    assert str(checkpoint_path(config, 10 if resume == "auto" else 5)) in str(caught.value)
    for field in fields:
        assert field in str(caught.value)
    named = [name for name in ("d_model", "num_layers", "d_ff", "rope", "seed", "tokens") if name in str(caught.value)]
    assert len(named) == len(fields)


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    def text_config(resume: str, skip_data: bool) -> RunConfig:
        data = dict(source="text", train_text=str(tmp_path / "text.txt"))
        return make_config(tmp_path, resume=resume, skip_data=skip_data, data=data, train=dict(max_steps=1))

    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog saw the cat. " * 100)
    train(text_config("none", skip_data=False))
    tokenizer = tmp_path / "data" / "tokenizer.json"
    Tokenizer.train(["a bird in a tree sang a song of a king and a queen. " * 100], 300).save(tokenizer)
    with pytest.raises(ValueError, match="was not made with the tokenizer"):
        train(text_config("auto", skip_data=True))
    for sidecar in (tmp_path / "data" / "train.json", tmp_path / "data" / "valid.json"):
        sidecar.unlink()
    with pytest.raises(ValueError, match="of another run: tokenizer is"):
        train(text_config("auto", skip_data=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_resume_leaves_the_run_folder_as_it_was(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    before = contents(run_dir(config))
    with pytest.raises(ValueError, match="of another run"):
        train(make_config(tmp_path, resume="auto", model=dict(d_model=64)))
    after = contents(run_dir(config))
    assert sorted(name for name in after if after[name] != before.get(name)) == []
    assert after.keys() == before.keys()


def on_text(tmp_path: Path, resume: str = "none", **data: Any) -> RunConfig:
    for i, name in enumerate("ab"):
        (tmp_path / f"{name}.txt").write_text(f"once upon a time {i}. " * (500 + i))
    fields: dict[str, Any] = dict(source="text", train_text=str(tmp_path / "a.txt"), data_dir=str(tmp_path / "d"))
    return make_config(
        tmp_path, resume=resume, model=dict(vocab_size=300), data={**fields, **data}, train=dict(max_steps=2)
    )


@pytest.mark.parametrize("changed", ["train_text", "valid_fraction"])
def test_a_refused_resume_leaves_the_runs_data_as_it_was(tmp_path: Path, changed: str) -> None:
    train(on_text(tmp_path))
    before = contents(tmp_path / "d")
    value = {"train_text": str(tmp_path / "b.txt"), "valid_fraction": 0.5}[changed]
    said = f"is of a run on .*train.npy, which would be made again: data.{changed} is .* here and .* there$"
    with pytest.raises(ValueError, match=said):
        train(on_text(tmp_path, "auto", **{changed: value}))
    assert contents(tmp_path / "d") == before
    # With a folder of its own nothing would be lost, so that the tokens themselves say it.
    with pytest.raises(ValueError, match=f"training tokens is .*; data.data_dir is .*/e' here .*; data.{changed} is"):
        train(on_text(tmp_path, "auto", data_dir=str(tmp_path / "e"), **{changed: value}))


def test_the_validation_text_may_change_on_a_resume(tmp_path: Path) -> None:
    train(on_text(tmp_path, valid_text=str(tmp_path / "b.txt")))
    (tmp_path / "c.txt").write_text("and they lived happily ever after. " * 500)
    train(on_text(tmp_path, "auto", valid_text=str(tmp_path / "c.txt")))


def test_a_run_of_another_seed_is_refused_before_its_data_is_made(tmp_path: Path) -> None:
    config = on_text(tmp_path)
    train(config)
    shutil.rmtree(tmp_path / "d")
    other = dataclasses.replace(resumed(config), train=dataclasses.replace(config.train, seed=5))
    with pytest.raises(ValueError, match=r"is of another run: train\.seed is 5 here and 0 there$"):
        train(other)
    assert not (tmp_path / "d").exists()


def test_weights_of_another_architecture_are_refused_before_the_data_is_made(
    tmp_path: Path, finished: RunConfig
) -> None:
    config = on_text(tmp_path, source="random", train_text=None)
    config = dataclasses.replace(
        config, init_from=str(finished.run_dir), model=dataclasses.replace(config.model, num_layers=3)
    )
    with pytest.raises(ValueError, match=r"is of another run: model\.num_layers is 3 here"):
        train(config)
    assert not (tmp_path / "d").exists()


def test_a_tokenizer_that_is_gone_is_not_trained_anew_for_a_run_that_has_a_copy(tmp_path: Path) -> None:
    train(on_text(tmp_path, data_dir=str(tmp_path / "parent")))
    given = tmp_path / "parent/tokenizer.json"
    config = on_text(tmp_path, tokenizer=str(given))
    shutil.rmtree(run_dir(config))
    train(config)
    gone = given.rename(tmp_path / "renamed.json")
    for path in (tmp_path / "d").iterdir():  # else all is there, and the tokenizer is asked for when it is loaded
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"does not exist: .*run/tokenizer.json is the run's copy of it$"):
        train(resumed(config))
    assert not given.exists()
    copied = dataclasses.replace(config.data, tokenizer=str(run_dir(config) / "tokenizer.json"))
    assert train(resumed(config, data=copied)).step == 2
    assert gone.is_file()


# Checkpoints that are kept


@pytest.mark.parametrize(
    "interval, keep_last, kept",
    [
        (0, None, [10]),
        (-1, None, [10]),
        (3, None, [3, 6, 9, 10]),
        (5, None, [5, 10]),
        (99, None, [10]),
        (1, 1, [10]),
        (3, 2, [9, 10]),
        (5, 1, [10]),
        (3, 99, [3, 6, 9, 10]),
    ],
)
def test_the_last_step_is_always_saved_and_keep_last_counts_it(
    tmp_path: Path, interval: int, keep_last: int | None, kept: list[int]
) -> None:
    config = make_config(tmp_path, checkpoint=dict(checkpointing_interval=interval, keep_last=keep_last))
    result = train(config)
    assert checkpoint_names(config) == [checkpoint_name(step) for step in kept]
    assert result.checkpoint == str(checkpoint_path(config, 10))
    for path in find_checkpoints(run_dir(config) / "checkpoints"):
        assert verify_checkpoint(path).sequences == 4 * int(path.name[5:])


def test_a_folder_that_holds_a_run_is_refused_with_advice(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    before = contents(run_dir(config))
    with pytest.raises(ValueError, match=r"holds a run already.*--resume auto.*another run_dir") as caught:
        train(config)
    assert str(config.run_dir) in str(caught.value)
    assert contents(run_dir(config)) == before


FOREIGN = {
    "a Hugging Face model": {
        "config.json": '{"model_type": "llama", "hidden_size": 32}',
        "model.safetensors": "weights",
        "tokenizer.json": "{}",
    },
    "a package": {"config.json": '{"model": "x", "name": "y"}'},
    "a group of another's": {"config.json": '{"model": {"d_model": 32}}'},
    "no JSON": {"config.json": "model: x"},
    "a list": {"config.json": "[]"},
    "an empty file": {"config.json": ""},
    "a tokenizer": {"tokenizer.json": "{}"},
    "a result": {"notes.txt": "", "result.json": "{}"},
    "measurements": {"metrics.jsonl": '{"step": 100}'},
}


@pytest.mark.parametrize("resume", ["none", "auto"])
@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_a_folder_with_somebody_elses_files_is_refused_and_left_as_it_was(
    tmp_path: Path, files: dict[str, str], resume: str
) -> None:
    config = make_config(tmp_path, resume=resume)
    run_dir(config).mkdir()
    for name, content in files.items():
        (run_dir(config) / name).write_text(content)
    before = contents(run_dir(config))
    with pytest.raises(ValueError, match=rf"{run_dir(config)} .* is not of a run"):
        train(config)
    assert contents(run_dir(config)) == before
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "kept",
    [[], [LOCK], ["config.json"], ["config.json", "result.json"], ["checkpoints", "result.json"]],
)
def test_a_folder_of_a_run_that_ended_early_or_was_copied_in_part_is_accepted(
    tmp_path: Path, finished: RunConfig, kept: list[str]
) -> None:
    config = make_config(tmp_path, run="other", resume="auto")
    run_dir(config).mkdir()
    for name in kept:
        path = run_dir(finished) / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, run_dir(config) / name)
    (run_dir(config) / "slurm.out").write_text("a file that no run writes")
    assert train(config).step == 10


def test_a_run_may_lie_in_the_folder_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog saw the cat. " * 100)
    data = dict(source="text", train_text=str(tmp_path / "text.txt"), data_dir=str(tmp_path / "run"))
    config = make_config(tmp_path, data=data, train=dict(max_steps=1))
    prepare_data(config)  # a run that was killed after this has a tokenizer, but no config.json yet
    assert train(config).step == 1


# A run's config.json


def test_the_configuration_of_a_run_that_was_moved_goes_on_where_it_is_told_to(
    tmp_path: Path, finished: RunConfig
) -> None:
    moved, before = run_dir(copy_of(finished, tmp_path)), contents(run_dir(finished))
    shutil.rmtree(moved / "checkpoints" / checkpoint_name(10))
    message = f"run_dir is {finished.run_dir!r} in config file {moved}/config.json, whose run was moved or copied"
    for given in (dict[str, str](), dict(resume="auto")):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}.* --run_dir {moved} ") as caught:
            load_config(moved / "config.json", **given)
        assert "\n" not in str(caught.value)
    train(load_config(moved / "config.json", resume="auto", run_dir=str(moved)))
    assert (moved / "checkpoints" / checkpoint_name(10)).is_dir()
    assert contents(run_dir(finished)) == before
    assert load_config(moved / "config.json").run_dir == str(moved)


def test_another_file_after_that_of_a_moved_run_may_name_the_folder(tmp_path: Path, finished: RunConfig) -> None:
    moved, more = run_dir(copy_of(finished, tmp_path)), tmp_path / "more.json"
    more.write_text(json.dumps({"run_dir": "new"}))
    files = ["--config", str(moved / "config.json"), "--config", str(more)]
    assert parse_run_config(files)[0].run_dir == "new"
    with pytest.raises(ValueError, match="moved or copied"):
        parse_run_config(files[2:] + files[:2])


@pytest.mark.parametrize("begun", ["metrics.jsonl", "checkpoints"])
def test_a_part_of_a_run_that_was_moved_is_known_as_its_own(tmp_path: Path, finished: RunConfig, begun: str) -> None:
    moved = run_dir(copy_of(finished, tmp_path))
    for path in moved.iterdir():
        if path.name not in ("config.json", begun):
            (shutil.rmtree if path.is_dir() else os.unlink)(path)
    with pytest.raises(ValueError, match="moved or copied"):
        load_config(moved / "config.json")


def test_a_runs_folder_by_another_path_is_the_same_folder(
    tmp_path: Path, finished: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy_of(finished, tmp_path)
    file = run_dir(config) / "config.json"
    file.write_text(json.dumps(config.to_dict() | {"run_dir": "run"}))
    (tmp_path / "link").symlink_to(run_dir(config))
    monkeypatch.chdir(tmp_path)
    for path in (file, Path("run/config.json"), Path("link/config.json"), Path("run/checkpoints/../config.json")):
        assert load_config(path).run_dir == "run"
    monkeypatch.chdir(run_dir(config))  # where "run" is another folder, run/run
    with pytest.raises(ValueError, match=r"--run_dir \. "):
        load_config("config.json")


def test_a_configuration_that_was_copied_alone_is_a_template(tmp_path: Path, finished: RunConfig) -> None:
    shutil.copy(run_dir(finished) / "config.json", tmp_path)
    assert load_config(tmp_path / "config.json") == finished


def test_whether_to_resume_is_not_kept(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    file = run_dir(config) / "config.json"
    file.write_text(json.dumps(config.to_dict() | {"resume": "auto"}))  # as earlier versions wrote it
    assert load_config(file).resume == "none"
    for resume in ("auto", checkpoint_path(config, 5)):
        shutil.rmtree(checkpoint_path(config, 10))
        train(resumed(config, resume))
        assert RunConfig.from_dict(json.loads(file.read_text())) == config
    written = tmp_path / "mine.json"
    written.write_text(json.dumps(config.to_dict() | {"resume": "auto"}))
    assert load_config(written).resume == "auto"


# One run at a time


@pytest.mark.parametrize("resume", ["none", "auto"])
def test_a_folder_in_use_is_refused_before_anything_is_read_or_made(
    tmp_path: Path, finished: RunConfig, caplog: pytest.LogCaptureFixture, resume: str
) -> None:
    config = make_config(tmp_path, resume=resume, data=dict(data_dir=str(tmp_path / "unmade")))
    if resume == "auto":
        copy_of(finished, tmp_path)
        DAMAGE["half a tensor file"](checkpoint_path(config, 10))  # half written, for all that a reader can know
    run_dir(config).mkdir(exist_ok=True)
    with (run_dir(config) / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="in use by another process") as caught:
            train(config)
    assert str(config.run_dir) in str(caught.value)
    assert warnings_of(caplog) == []
    assert not (tmp_path / "unmade").exists()


def test_of_two_processes_that_start_in_one_folder_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins, and ends, while the first prepares its data."""
    config = make_config(tmp_path)
    outcomes: list[str] = []

    def start() -> None:
        try:
            train(config)
            outcomes.append("ran")
        except ValueError:
            outcomes.append("refused")

    def prepare_slowly(of: RunConfig, *_: Any) -> Any:
        monkeypatch.setattr("cs336_systems.training.prepare.prepare_data", prepare_data)
        start()
        return prepare_data(of)

    monkeypatch.setattr("cs336_systems.training.prepare.prepare_data", prepare_slowly)
    start()
    assert sorted(outcomes) == ["ran", "refused"]


# The end of a run in other ways


def test_a_run_that_stops_on_a_loss_that_is_not_finite_keeps_its_checkpoint_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def poisoned(trainer: Trainer, *_: Any) -> dict[str, Any]:
        if trainer.position.step == 6:
            with torch.no_grad():
                trainer.model.ln_final.weight[0] = math.inf
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    config = make_config(tmp_path, checkpoint=EVERY_FIVE)
    threads = threading.active_count()
    with pytest.raises(NonFiniteError, match=r"step 7: .*sequences 24 to 27"):
        train(config)
    assert threading.active_count() == threads
    assert checkpoint_names(config) == [checkpoint_name(5)]
    verify_checkpoint(checkpoint_path(config, 5))
    assert [row["step"] for row in loss_rows(config)] == list(range(1, 7))

    monkeypatch.undo()
    without_plot(monkeypatch)
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


# Real processes and real signals

LONG = dict(max_steps=100, batch_size=8, gradient_accumulation_steps=4, validation_interval=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run long enough to be hit in its midst."""
    config = make_config(tmp_path_factory.mktemp("undisturbed"), train=LONG)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(config)
    torch.set_num_threads(threads)
    return config


def assert_same_long_end(config: RunConfig, undisturbed: RunConfig) -> None:
    assert_same_tensors(end_of(config, 100).tensors, end_of(undisturbed, 100).tensors)
    assert loss_rows(config) == loss_rows(undisturbed)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_process_after_its_step_with_a_checkpoint_from_which_the_run_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: RunConfig, number: signal.Signals, code: int
) -> None:
    config = dataclasses.replace(undisturbed, run_dir=str(tmp_path / "run"))
    with running_train(config) as process:
        wait_until(has_rows(config, 5), process)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "")
    assert f"{number.name}: stopping after this step" in out
    assert "--resume auto" in out

    result = json.loads((run_dir(config) / "result.json").read_text())
    step = result["step"]
    assert 5 <= step < 100, "the signal came too late for this test"
    assert result["interrupted"] == number.name
    assert read_metrics(run_dir(config) / METRICS_FILE)[-1] == {"step": step, "valid_loss": result["valid_loss"]}
    assert [row["step"] for row in loss_rows(config)] == list(range(1, step + 1))
    assert checkpoint_names(config) == [checkpoint_name(step)]
    assert verify_checkpoint(checkpoint_path(config, step)).step == step

    train(resumed(config))
    assert_same_long_end(config, undisturbed)


def test_a_second_process_is_refused_and_a_killed_one_leaves_a_folder_that_goes_on_to_the_same_end(
    tmp_path: Path, undisturbed: RunConfig
) -> None:
    config = dataclasses.replace(
        undisturbed,
        run_dir=str(tmp_path / "run"),
        checkpoint=make_config(tmp_path, checkpoint=dict(checkpointing_interval=3, keep_last=2)).checkpoint,
    )
    with running_train(config) as process:
        wait_until(has_rows(config, 10), process)
        with pytest.raises(ValueError, match="in use by another process") as caught:
            train(resumed(config))
        assert str(config.run_dir) in str(caught.value)
        assert process.poll() is None, "the run ended too soon for this test"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    train(resumed(config))
    assert_same_long_end(config, undisturbed)
    assert checkpoint_names(config) == [checkpoint_name(99), checkpoint_name(100)]


HANGING = """
import sys, time
from cs336_systems.cli.main import main
from cs336_systems.training.loop import Trainer
def hang(self, stop):
    print("in the step", flush=True)
    for _ in range(600):
        time.sleep(0.1)
Trainer.train_step = hang
main()
"""


def test_a_second_sigint_ends_a_run_at_once_whose_step_does_not_end(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running_train(config, HANGING) as process:
        read_until(process, "in the step")
        process.send_signal(signal.SIGINT)
        read_until(process, "SIGINT: stopping after this step")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=15)
    assert process.returncode not in (0, 143)
    assert "Traceback" not in err
    assert checkpoint_names(config) == []
    with (run_dir(config) / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the folder is free


def read_until(process: subprocess.Popen, text: str) -> None:
    """Read the output of a process up to the line with the text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} was not printed: {lines}")


# Files of a run


@pytest.mark.usefixtures("drawn")
def test_a_run_from_python_returns_its_result_and_leaves_its_files(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, data=dict(source="stories", story_chars=10_000), sample=dict(prompt="The", max_new_tokens=5)
    )
    result = train(config)
    folder = run_dir(config)
    assert json.loads((folder / "result.json").read_text()) == dataclasses.asdict(result)
    assert result.run_dir == str(folder)
    assert load_config(folder / "config.json") == config
    assert Path(result.checkpoint) == checkpoint_path(config, 10)
    assert result.step == 10
    assert result.interrupted is None

    rows = read_metrics(folder / METRICS_FILE)
    assert result.train_loss == next(row["loss"] for row in rows if row["step"] == 10)
    assert result.valid_loss == rows[-1]["valid_loss"]
    assert result.sample is not None
    assert result.sample.startswith("The")
    assert (folder / "sample.txt").read_text() == result.sample
    assert Tokenizer.load(folder / "tokenizer.json").sha256 == Tokenizer.load(tmp_path / "data/tokenizer.json").sha256
    assert result.tokens_per_s is not None
    assert result.tokens_per_s == pytest.approx(4 * 16 / result.step_ms["p50"] * 1e3)

    curve = Path(result.loss_curve)
    assert curve.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = matplotlib.image.imread(curve)[..., :3]
    height, width = image.shape[:2]
    middle = image[height // 8 : -height // 8, width // 8 : -width // 8]
    coloured = (middle.max(axis=-1) - middle.min(axis=-1)) > 0.2
    assert coloured.any(axis=0).mean() > 0.5, "no curve runs over the width of the picture"


@pytest.mark.usefixtures("drawn")
def test_an_interrupted_runs_result_is_written_and_drawn_too(tmp_path: Path) -> None:
    result = stop_after(1, lambda: train(make_config(tmp_path)))
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == dataclasses.asdict(result)
    assert matplotlib.image.imread(result.loss_curve).std() > 0


def strict_json(text: str) -> Any:
    """As other programs read JSON: NaN and Infinity are none of it (RFC 8259)."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_files_of_a_run_with_unlimited_gradients_are_json_and_can_be_run_again(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(max_grad_norm=math.inf, max_steps=1))
    result = train(config)
    assert load_config(tmp_path / "run" / "config.json") == config
    for path in (tmp_path / "run" / "config.json", Path(result.checkpoint) / MANIFEST):
        strict_json(path.read_text())


def test_the_metrics_of_a_skipped_step_are_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.train_step

    def poisoned(trainer: Trainer, *_: Any) -> dict[str, Any]:
        with torch.no_grad():
            trainer.model.ln_final.weight[0] = math.nan
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", poisoned)
    train(make_config(tmp_path, train=dict(skip_nonfinite=True, max_steps=2)))
    for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines():
        strict_json(line)


def test_without_a_run_folder_one_is_named_after_source_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(dataclasses.replace(make_config(tmp_path, train=dict(max_steps=1)), run_dir=None))
    assert result.run_dir.startswith("runs/random-2")
    assert (tmp_path / result.run_dir / "result.json").is_file()


def test_newer_checkpoints_of_a_try_that_is_not_gone_on_with_are_set_aside_not_lost(
    tmp_path: Path, finished: RunConfig
) -> None:
    """Resume at 5, stop at 7: a later --resume auto must go on from 7, not from the earlier try's 10."""
    config = copy_of(finished, tmp_path)
    before = read_independently(checkpoint_path(config, 10))
    stop_after(7, lambda: train(resumed(config, checkpoint_path(config, 5))))
    assert checkpoint_names(config) == [checkpoint_name(5), checkpoint_name(7), "superseded-step_00000010"]
    aside = checkpoint_path(config, 10).with_name("superseded-step_00000010")
    assert_same_tensors(read_independently(aside), before)
    train(resumed(config))
    assert [row["step"] for row in loss_rows(config)] == list(range(1, 11))
    assert_same_tensors(read_independently(checkpoint_path(config, 10)), before)


def test_checkpoints_set_aside_by_two_tries_are_all_there(tmp_path: Path, finished: RunConfig) -> None:
    config = copy_of(finished, tmp_path)
    first = read_independently(checkpoint_path(config, 10))
    for lr in (0.01, 0.02):
        optimizer = dataclasses.replace(config.optimizer, lr=lr)
        train(resumed(config, checkpoint_path(config, 5), optimizer=optimizer))
    asides = ["superseded-step_00000010", "superseded-step_00000010-2"]
    assert checkpoint_names(config) == [checkpoint_name(5), checkpoint_name(10), *asides]
    folder = checkpoint_path(config, 10).parent
    assert_same_tensors(read_independently(folder / asides[0]), first)


@pytest.mark.parametrize("part", ["", "checkpoints"])
def test_a_folder_of_checkpoints_is_not_taken_for_one(tmp_path: Path, finished: RunConfig, part: str) -> None:
    config = copy_of(finished, tmp_path)
    said = f"it must be none, auto or the folder of a checkpoint, such as {checkpoint_path(config, 10)}$"
    with pytest.raises(ValueError, match=said):
        train(resumed(config, run_dir(config) / part))


def test_a_checkpoint_of_one_run_is_not_gone_on_from_in_the_folder_of_another(
    tmp_path: Path, finished: RunConfig
) -> None:
    config = copy_of(finished, tmp_path)
    with pytest.raises(ValueError, match="holds another run than resume"):
        train(resumed(config, checkpoint_path(finished, 5)))
    with pytest.raises(ValueError, match=r"resume is '.*/nowhere': it must be none, auto or the folder of"):
        train(resumed(config, tmp_path / "nowhere"))  # which is no other run


@pytest.mark.parametrize(
    "name", ["checkpoints", "config.json", "tokenizer.json", "metrics.jsonl", "result.json", "sample.txt"]
)
def test_a_file_in_place_of_a_folder_or_a_folder_in_place_of_a_file_is_found_before_training(
    name: str, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    run_dir(config).mkdir()
    wrong = run_dir(config) / name
    (wrong.touch if name == "checkpoints" else wrong.mkdir)()
    with pytest.raises(ValueError, match=rf"run_dir .* holds a (file|folder) {name}\b"):
        train(config)
    assert not (tmp_path / "data").exists()


def test_a_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run_dir .*xxx cannot be read: File name too long"):
        train(dataclasses.replace(make_config(tmp_path), run_dir=str(tmp_path / ("x" * 300))))


def test_a_resumed_run_keeps_its_init_from_and_takes_no_other(tmp_path: Path, finished: RunConfig) -> None:
    config = dataclasses.replace(make_config(tmp_path, train=dict(max_steps=2)), init_from=finished.run_dir)
    train(config)
    on = resumed(dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=3)))
    train(dataclasses.replace(on, init_from=None))
    assert json.loads((run_dir(config) / "config.json").read_text())["init_from"] == finished.run_dir
    assert train(on).step == 3
    other = dataclasses.replace(on, init_from="elsewhere")
    with pytest.raises(ValueError, match=r"init_from is 'elsewhere': .* of a run that began with .*; leave it out"):
        train(other)
    fresh = resumed(copy_of(finished, tmp_path / "copy"))
    with pytest.raises(ValueError, match=r"began with random weights"):
        train(dataclasses.replace(fresh, init_from=config.run_dir))


def test_a_mistake_leaves_no_empty_run_folder(tmp_path: Path) -> None:
    config = make_config(tmp_path, data=dict(source="text", train_text=str(tmp_path / "missing.txt")))
    with pytest.raises(FileNotFoundError):
        train(config)
    assert not Path(str(config.run_dir)).exists()


# Passes over the training tokens


@pytest.mark.parametrize(("max_steps", "is_told"), [(8, False), (9, True)])
def test_many_passes_over_the_training_tokens_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, max_steps: int, is_told: bool
) -> None:
    sizes = dict(model=dict(context_length=8), train=dict(batch_size=16, max_steps=max_steps))
    train(make_config(tmp_path, data=dict(random_tokens=64), **sizes))
    told = [message for message in warnings_of(caplog) if "passes over these tokens" in message]
    assert len(told) == is_told
    if is_told:
        assert f"that is {9 * 16 * 8 / 64:.0f} passes" in told[0]
