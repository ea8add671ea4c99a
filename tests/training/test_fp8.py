"""Training with FP8 products: beside bf16, with every strategy, and together with whatever changes a step."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cs336_basics.stories import stories
from cs336_systems.cli import models
from cs336_systems.config.run import STRATEGIES, RunConfig
from cs336_systems.kernels import fp8_linear
from cs336_systems.training import train
from cs336_systems.training.build import initial_model
from cs336_systems.training.load import load_model
from cs336_systems.training.loop import Trainer

from ..distributed import run_ranks
from .helpers import loss_rows, make_config, random_tokens, warnings_of
from .runs import resumed

STEPS = 6
NEAR = 0.02
"""In nats: the losses of a few steps in fp8 and in bf16 differ by less. Their first are about 5.7."""


def trainer_of(config: RunConfig, tokens: np.ndarray | None = None) -> "closing[Trainer]":
    """A Trainer on a new model, with the configuration's attention."""
    device = torch.device(config.train.device)
    model = initial_model(config, device, None)
    return closing(Trainer(config, model, random_tokens() if tokens is None else tokens, device))


def losses_of(device: str = "cpu", rounds_each_time: bool = False, **groups: Any) -> list[float]:
    """The losses of a tiny run. rounds_each_time: products round weights themselves, as in a sharded model."""
    train = dict(precision="fp8", device=device, compile=False, cuda_graph=False, batch_size=8)
    groups["train"] = train | groups.get("train", {})
    with trainer_of(make_config(Path("unused"), **groups)) as trainer:
        if rounds_each_time:
            trainer._fp8 = []
        return [row["loss"] for row in trainer.train_steps(STEPS)]


@pytest.mark.parametrize(
    "model, message",
    [(dict(d_model=40), "d_model is 40"), (dict(d_ff=72), "d_ff is 72"),
     (dict(head_dim=10), "num_heads times the head size is 40"),
     (dict(num_kv_heads=1), "num_kv_heads times the head size is 8")],
    ids=str,
)  # fmt: skip
def test_sizes_that_fp8_products_cannot_have_are_named_first(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^model\.{message}: it must be a multiple of 16 with train.precision 'fp8'"):
        make_config(Path("unused"), model=dict(d_model=32, num_heads=4) | model, train=dict(precision="fp8"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("how", [{}, {"activation_checkpointing": "block"}])
def test_weights_are_rounded_once_a_step(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    how = {"gradient_accumulation_steps": 2, **how}
    assert losses_of(train=how) == losses_of(train=how, rounds_each_time=True)
    rounded: list[Tensor] = []
    quantized = fp8_linear.quantized

    def count(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        rounded.append(x)
        return quantized(x, *rest)

    monkeypatch.setattr(fp8_linear, "quantized", count)
    config = make_config(Path("unused"), train=dict(precision="fp8", batch_size=8, **how))
    with trainer_of(config) as trainer:
        monkeypatch.setattr(trainer, "_quantize", count)
        trainer.train_step()
        weights = {p.data_ptr() for p in trainer.model.layers.parameters() if p.ndim == 2}
        assert sorted(x.data_ptr() for x in rounded if x.data_ptr() in weights) == sorted(weights)
        before = len(rounded)
        trainer.evaluate(random_tokens())
        assert {x.data_ptr() for x in rounded[before:]} >= weights
        assert all(layer.rounded is None for layer in trainer._fp8)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "how",
    [
        dict(activation_checkpointing="block"),
        dict(activation_checkpointing="groups_1"),
        dict(activation_checkpointing="block_but_attention"),
        dict(activation_offload="first_1"),
    ],
)
def test_what_keeps_or_recomputes_activations_changes_no_bit(how: dict[str, Any]) -> None:
    model = dict(num_layers=2, attention="flash_torch")
    assert losses_of(model=model, train=how) == losses_of(model=model)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "groups",
    [
        dict(train=dict(loss_chunk_tokens=16)),
        dict(train=dict(weight_dtype="bf16")),
        dict(optimizer=dict(name="muon")),
        dict(model=dict(num_kv_heads=1, tie_embeddings=True)),
    ],
)
def test_it_is_near_bf16_with_everything_else(groups: dict[str, Any]) -> None:
    bf16 = groups | {"train": groups.get("train", {}) | {"precision": "bf16"}}
    losses, wide = losses_of(**groups), losses_of(**bf16)
    assert losses == pytest.approx(wide, abs=NEAR)
    assert losses != wide


WAYS = [
    *(dict(strategy=name) for name in STRATEGIES if name != "none"),
    dict(strategy="overlap", shard_optimizer=True),
    dict(strategy="bucketed", shard_optimizer="simple"),
    dict(strategy="fsdp", reshard_after_forward=False),
]


def losses_on_ranks() -> list[list[float]]:
    return [losses_of(parallel=way) for way in WAYS]


def test_two_ranks_learn_alike_whatever_their_strategy() -> None:
    alone = losses_of()
    for found in run_ranks(losses_on_ranks, 2):
        for way, losses in zip(WAYS, found, strict=True):
            assert losses == pytest.approx(alone, abs=NEAR), way  # half a batch has scales of its own


def test_a_run_changes_to_fp8_and_back_and_is_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    text = tmp_path / "text.txt"
    text.write_text("".join(stories(seed=0, min_chars=20_000)))
    data = dict(source="text", train_text=str(text))
    how: dict[str, Any] = dict(data=data, optimizer=dict(cosine_steps=9, lr=1e-2, warmup_steps=3))
    rows: list[Any] = []
    slow = "train.precision is 'fp8', which may gain nothing here: a CPU rounds to FP8, but does not multiply faster"
    for precision, end in (("fp8", 3), ("bf16", 6), ("fp8", 9)):
        caplog.clear()
        config = make_config(tmp_path, train=dict(precision=precision, max_steps=end), **how)
        train(resumed(config) if rows else config)
        rows = loss_rows(config)
        assert (slow in warnings_of(caplog)) == (precision == "fp8")
        assert f"threads in {precision}" in caplog.text
    throughout = make_config(tmp_path, "throughout", train=dict(max_steps=9, precision="bf16"), **how)
    train(throughout)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in loss_rows(throughout)], abs=NEAR)
    models.export([str(config.run_dir), "--format", "hf", "--out", str(tmp_path / "hf")])
    ours, theirs = (load_model(str(path)).build("cpu") for path in (config.run_dir, tmp_path / "hf"))
    tokens = torch.arange(16)[None]
    assert torch.equal(ours(tokens), theirs(tokens))


# On a GPU


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WIDE = dict(d_model=256, d_ff=1024, num_heads=4, num_layers=2)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_recorded_step_has_the_bits_of_one_that_is_not(compile: bool, accumulation: int) -> None:
    how = dict(compile=compile, gradient_accumulation_steps=accumulation)
    recorded, plain = (losses_of("cuda", model=WIDE, train=how | dict(cuda_graph=graph)) for graph in (True, False))
    assert recorded == plain
    each_time = losses_of("cuda", True, model=WIDE, train=how)
    assert plain == (pytest.approx(each_time, abs=1e-3) if compile else each_time)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash_triton", "sdpa"])
def test_the_loss_falls_as_in_bf16_on_a_gpu(attention: str) -> None:
    """A model that learns a few sequences by heart."""
    config = make_config(
        Path("unused"), model=WIDE | dict(attention=attention), optimizer=dict(lr=3e-3, warmup_steps=5),
        train=dict(max_steps=100, batch_size=8, device="cuda", compile=True, cuda_graph=True),
    )  # fmt: skip
    ends = {}
    for precision in ("bf16", "fp8"):
        train = dataclasses.replace(config.train, precision=precision)
        with trainer_of(dataclasses.replace(config, train=train), random_tokens(200)) as trainer:
            losses = [row["loss"] for row in trainer.train_steps(100)]
            valid = trainer.evaluate(random_tokens(200))
        assert losses[-1] < losses[0] / 2, (precision, losses)
        assert valid < losses[0] / 2, (precision, valid)
        ends[precision] = sum(losses[-10:]) / 10
    assert ends["fp8"] == pytest.approx(ends["bf16"], rel=0.1, abs=0.05), ends


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "how",
    [
        dict(activation_checkpointing="block"),
        dict(activation_checkpointing="block_but_attention"),
        dict(activation_offload="first_1"),
    ],
)
def test_recorded_steps_that_recompute_or_offload_on_a_gpu(how: dict[str, Any]) -> None:
    model, common = WIDE | dict(attention="flash_triton"), dict(cuda_graph=True)
    assert losses_of("cuda", model=model, train=how | common) == losses_of("cuda", model=model, train=common)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [dict(activation_checkpointing="block_but_attention"), dict(compile_memory_budget=0.5)])
def test_compiled_blocks_that_recompute_are_near_those_that_do_not(how: dict[str, Any]) -> None:
    common = dict(compile=True, cuda_graph=True)
    # At a higher rate the losses jump, and any other rounding moves them by up to 0.02.
    groups = dict(model=WIDE | dict(attention="flash_triton"), optimizer=dict(lr=3e-3, warmup_steps=5))
    plain = losses_of("cuda", **groups, train=common)
    assert losses_of("cuda", **groups, train=how | common) == pytest.approx(plain, abs=NEAR)
