"""The run folder: its files, whose it is, its configuration, and one run at a time."""

import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from cs336_basics.tokenizer import Tokenizer
from cs336_systems.cli import load_config
from cs336_systems.cli.train import parse_run_config
from cs336_systems.config.run import RunConfig
from cs336_systems.training import run, train
from cs336_systems.training.folder import LOCK
from cs336_systems.training.manifest import MANIFEST, checkpoint_name, find_checkpoints, verify_checkpoint
from cs336_systems.training.metrics import METRICS_FILE, read_metrics
from cs336_systems.training.prepare import prepare_data

from .helpers import (
    DAMAGE,
    assert_same_tensors,
    checkpoint_names,
    checkpoint_path,
    loss_rows,
    make_config,
    read_independently,
    warnings_of,
)
from .runs import (
    contents,
    copy_of,
    resumed,
    run_dir,
    stop_after,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
    keep_one = make_config(tmp_path, checkpoint=dict(keep_last=1)).checkpoint
    stop_after(7, lambda: train(resumed(config, checkpoint_path(config, 5), checkpoint=keep_one)))
    assert checkpoint_names(config) == [checkpoint_name(7), "superseded-step_00000010"]
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


def test_a_resumed_run_keeps_its_init_from_and_takes_no_other(tmp_path: Path, finished: RunConfig) -> None:
    config = dataclasses.replace(make_config(tmp_path, train=dict(max_steps=2)), init_from=finished.run_dir)
    train(config)
    on = resumed(dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=3)))
    train(dataclasses.replace(on, init_from=None))
    assert json.loads((run_dir(config) / "config.json").read_text())["init_from"] == finished.run_dir
    assert train(on).step == 3
    with pytest.raises(ValueError, match=r"^init_from is 'elsewhere': elsewhere does not exist"):
        train(dataclasses.replace(make_config(tmp_path, "third"), init_from="elsewhere"))
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


@pytest.mark.parametrize(("limit", "is_told"), [(1e12, False), (1.0, True)])
def test_a_step_that_takes_a_cpu_long_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, limit: float, is_told: bool
) -> None:
    monkeypatch.setattr(run, "_SLOW_ON_A_CPU", limit)
    train(make_config(tmp_path, train=dict(max_steps=1)))
    assert any(message.startswith("there is no GPU, and a step has ") for message in warnings_of(caplog)) == is_told


@pytest.mark.parametrize(("losses", "is_told"), [((3, 2, 2.05), False), ((3, 2, 2.5), True), ((3, 2, math.nan), False)])
def test_a_validation_loss_that_rises_again_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, losses: Any, is_told: bool
) -> None:
    found = iter(losses)
    monkeypatch.setattr(run.Trainer, "evaluate", lambda *_: next(found))
    train(make_config(tmp_path, train=dict(max_steps=3, validation_interval=1)))
    told = [message for message in warnings_of(caplog) if message.startswith("the validation loss")]
    assert told == ["the validation loss rose from 2.000 at step 2 to 2.500: take fewer steps, or more text"] * is_told


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
