"""A run of any precision goes on in any other, with any strategy and number of ranks: checkpoints have the masters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.config.run import RunConfig
from cs336_systems.training import train
from cs336_systems.training.checkpoint import save_checkpoint
from cs336_systems.training.loop import Trainer
from cs336_systems.training.manifest import Manifest, checkpoint_name
from cs336_systems.training.optimizer import joined, rest_of
from cs336_systems.training.state import collect_state, restore_state

from ..distributed import run_ranks
from .helpers import (
    REST,
    assert_same_tensors,
    change_manifest,
    checkpoint_path,
    forge_manifest,
    loss_rows,
    make_config,
    tiny_trainer,
    whole,
)
from .runs import resumed

pytestmark = pytest.mark.usefixtures("one_thread")


Way = dict[str, Any]  # precision and weight_dtype; strategy and shard_optimizer; implementation
WAYS: dict[int, list[Way]] = {
    1: [dict(precision="bf16"), dict(precision="fp32"), dict(precision="fp16"), dict(implementation="fused")],
    2: [
        dict(precision="bf16", strategy="fsdp"),
        dict(precision="bf16", strategy="bucketed", shard_optimizer=True),
        dict(precision="fp16", strategy="overlap", shard_optimizer="simple"),
        dict(precision="bf16", strategy="torch_fsdp"),
    ],
}
SOME = (0, 5)
"""How far behind each way those come from which it goes on: itself, and one on another number of ranks."""
OF_16_BITS = dict(precision="bf16", weight_dtype="bf16")
"""A run that keeps its weights in 16 bits: the others cast its state, so it is only a source."""


def config_of(way: Way) -> RunConfig:
    fields = {name: {key: way[key] for key in keys if key in way} for name, keys in dict(
        train=("precision", "weight_dtype"), parallel=("strategy", "shard_optimizer"), optimizer=("implementation",)
    ).items()}  # fmt: skip
    return make_config(Path("unused"), **fields)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return collect_state(trainer.model, trainer.optimizer, torch.device("cpu"), trainer.strategy.shards())


def save_each(ways: list[Way], folders: list[Path]) -> list[float]:
    """Two steps and a save in each way; the loss of a third."""
    losses = []
    for way, folder in zip(ways, folders, strict=True):
        with tiny_trainer(config_of(way)) as trainer:
            for _ in range(2):
                trainer.train_step()
            save_checkpoint(folder, state_of(trainer), Manifest(step=1, **REST))
            losses.append(trainer.train_step()["loss"])
    return losses


def resume_each(pairs: list[tuple[Way, Path]], folder: Path) -> list[tuple[Way, Path, Path, float, bool]]:
    """Resume in each way from its source, save again, and make a step.

    Way, source, new checkpoint, loss, and whether the model's weights are their masters, rounded.
    """
    results = []
    for number, (way, source) in enumerate(pairs):
        with tiny_trainer(config_of(way)) as trainer:
            trainer.train_step()  # so that there is a state to be replaced
            restore_state(source, trainer.model, trainer.optimizer, trainer.device, trainer.strategy.shards())
            trainer.position.step, trainer.position.sequences = 2, 8
            again = save_checkpoint(folder / str(number), state_of(trainer), Manifest(step=1, **REST))
            optimizer = trainer.optimizer
            weights = [(p.detach(), rest_of(p, optimizer.state.get(p, {}))) for p in trainer.model.parameters()]
            is_rounded = all(torch.equal(p, joined(p, rest).to(p.dtype)) for p, rest in weights)
            results.append((way, source, again, trainer.train_step()["loss"], is_rounded))
    return results


def save_all(root: Path) -> dict[Path, tuple[Way, float]]:
    """Checkpoints of all ways, with the loss that each had a step later."""
    found = {}
    for world_size, ways in WAYS.items():
        ways = [*ways, OF_16_BITS] if world_size == 1 else ways
        folders = [root / f"saved-{world_size}-{i}" for i in range(len(ways))]
        losses = run_ranks(save_each, world_size, ways, folders)[0]
        found |= {
            folder / checkpoint_name(1): (way, loss)
            for folder, way, loss in zip(folders, ways, losses, strict=True)
        }  # fmt: skip
    return found


@pytest.mark.parametrize("behind", [SOME, pytest.param(range(9), marks=pytest.mark.slow)])
def test_every_precision_goes_on_from_every_other(tmp_path: Path, behind: Sequence[int]) -> None:
    """Without -m slow from some: what a checkpoint holds does not depend on who goes on with it."""
    saved, results = save_all(tmp_path), []
    sources = list(saved)
    own = {str(way): i for i, (way, _) in enumerate(saved.values())}
    for world_size, ways in WAYS.items():
        pairs = [(way, sources[(own[str(way)] + far) % len(sources)]) for way in ways for far in behind]
        results += run_ranks(resume_each, world_size, pairs, tmp_path / f"again-{world_size}")[0]
    assert len(results) == sum(map(len, WAYS.values())) * len(behind)
    assert {source for _, source, *_ in results} == set(sources)
    for way, source, again, loss, is_rounded in results:
        before, expected = saved[source]
        assert is_rounded, (way, before)
        after, there = whole(again), whole(source)
        assert {tensor.dtype for name, tensor in after.items() if name.startswith("model.")} == {torch.float32}
        wide = {name: t.to(after[name].dtype) for name, t in there.items()} if before == OF_16_BITS else there
        assert after.keys() == wide.keys()
        for name, tensor in after.items():  # but for the last bit of few weights: see `optimizer.halves`
            last_bit = 2**-22 if name.startswith("model.") else 0
            torch.testing.assert_close(tensor, wide[name], rtol=last_bit, atol=0)
        if way == before:
            assert loss == expected, way
        assert loss == pytest.approx(expected, rel=2e-3), (way, before)


def test_a_run_changes_to_float32_and_back(tmp_path: Path) -> None:
    rows = []
    for precision, end in (("bf16", 3), ("fp32", 6), ("bf16", 9)):
        config = make_config(tmp_path, train=dict(precision=precision, max_steps=end), optimizer=dict(cosine_steps=9))
        config = resumed(config) if rows else config
        train(config)
        rows = loss_rows(config)
    throughout = make_config(tmp_path, "throughout", train=dict(max_steps=9), optimizer=dict(cosine_steps=9))
    train(throughout)
    expected = [row["loss"] for row in loss_rows(throughout)]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=5e-3)
    assert [row["loss"] for row in rows] != expected


def test_a_checkpoint_from_before_there_were_masters_goes_on(tmp_path: Path) -> None:
    """It has float32 weights, the state of PyTorch's AdamW, and the state of PyTorch's GradScaler."""
    old = make_config(tmp_path, train=dict(max_steps=3), optimizer=dict(implementation="torch_fused", cosine_steps=6))
    train(old)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7, enabled=True).state_dict()
    path = checkpoint_path(old, 3)
    forge_manifest(path, lambda manifest: manifest.update(format=1))
    forge_manifest(path, lambda manifest: manifest["trainer"].update(scaler=scaler))
    forge_manifest(path, lambda manifest: manifest["config"]["train"].update(precision="fp16"))
    new = make_config(tmp_path, train=dict(max_steps=4, precision="fp16"), optimizer=dict(cosine_steps=6))
    train(resumed(new))
    with_scale = whole(checkpoint_path(new, 4))
    assert with_scale["optimizer.lm_head.weight.step"].item() == 4
    kept: list[Any] = []
    change_manifest(checkpoint_path(new, 4), lambda manifest: kept.append(manifest["trainer"]["scaler"]))
    assert kept == [{"scale": 2.0**7, "_growth_tracker": 1}]


def init_from(config: RunConfig) -> list[dict[str, Any]]:
    train(config)
    return loss_rows(config)


@pytest.mark.parametrize("strategy, shard", [("overlap", True), ("fsdp", False)])
def test_two_ranks_begin_with_the_masters_of_another_run(tmp_path: Path, strategy: str, shard: bool) -> None:
    first = make_config(tmp_path, "first", train=dict(precision="bf16", max_steps=3))
    train(first)
    settings: dict[str, Any] = dict(
        train=dict(precision="bf16", max_steps=1), optimizer=dict(lr=0.0, weight_decay=0.0),
        parallel=dict(strategy=strategy, shard_optimizer=shard),
    )  # fmt: skip
    second = dataclasses.replace(make_config(tmp_path, "second", **settings), init_from=str(first.run_dir))
    run_ranks(init_from, 2, second)
    there, here = (whole(checkpoint_path(*each)) for each in ((first, 3), (second, 1)))
    weights = {name: tensor for name, tensor in there.items() if name.startswith("model.")}
    assert_same_tensors({name: here[name] for name in weights}, weights)
