"""Which checkpoint a run continues from, and which it refuses."""

import dataclasses
import logging
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cs336_basics.tokenizer import Tokenizer
from cs336_systems.config.run import RunConfig
from cs336_systems.training import train
from cs336_systems.training.manifest import MANIFEST, verify_checkpoint

from .helpers import (
    DAMAGE,
    TENSOR_DAMAGE,
    checkpoint_path,
    forge_manifest,
    loss_rows,
    make_config,
    tensor_file,
    warnings_of,
)
from .runs import (
    assert_same_end,
    contents,
    copy_of,
    end_of,
    resumed,
    run_dir,
    stop_after,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# test_checkpoint.py has the others.
SOME_DAMAGE = ["half a tensor file", "a byte flipped", "no manifest"]


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
    forge_manifest(checkpoint_path(config, 10), lambda manifest: manifest["trainer"]["scaler"].pop("_growth_tracker"))
    longer = dataclasses.replace(config.train, max_steps=12)
    with pytest.raises(ValueError, match=r"step_00000010 .*no '_growth_tracker'"):
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
    with pytest.raises(
        ValueError, match="of another run: the tokenizer differs; the text or its files have changed; init_from takes"
    ):
        train(text_config("auto", skip_data=True))


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
    with pytest.raises(ValueError, match=f"tokens differ; data.data_dir is .*/e' here .*; data.{changed} is"):
        train(on_text(tmp_path, "auto", data_dir=str(tmp_path / "e"), **{changed: value}))


def test_a_resume_with_another_source_is_refused_before_its_tokens_are_made(tmp_path: Path) -> None:
    train(on_text(tmp_path))
    said = "is of a run on other data: .*data.source is 'stories' here and 'text' there; .*--config .*/run/config.json$"
    with pytest.raises(ValueError, match=said):
        train(on_text(tmp_path, "auto", source="stories", train_text=None, data_dir=str(tmp_path / "e")))
    assert not [*(tmp_path / "e").glob("to*"), *(tmp_path / "e").glob("*.npy")]


def test_the_validation_text_may_change_on_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(on_text(tmp_path, valid_text=str(tmp_path / "b.txt")))
    train(on_text(tmp_path, "auto", valid_text=str(tmp_path / "b.txt")))
    assert not any(warning.startswith("resume") for warning in warnings_of(caplog))
    (tmp_path / "c.txt").write_text("and they lived happily ever after. " * 500)
    train(on_text(tmp_path, "auto", valid_text=str(tmp_path / "c.txt")))
    (warning,) = (warning for warning in warnings_of(caplog) if warning.startswith("resume"))
    assert re.fullmatch("resume: data.valid_text .*c.txt' here .*b.txt' there: .* may be of different texts", warning)


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
    message = r"is of another run: model\.num_layers is 3 here.*; init_from brings its own model: "
    with pytest.raises(ValueError, match=message):
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
