"""Muon: the steps of torch.optim.Muon beside AdamW, on one process and on several, saved, resumed and refused."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cs336_basics.nn_utils import cross_entropy
from cs336_basics.optimizer import orthogonalize
from cs336_systems.config.run import RunConfig
from cs336_systems.parallel import comm
from cs336_systems.planner.accounting import orthogonalization_flops
from cs336_systems.training import train
from cs336_systems.training.checkpoint import save_checkpoint
from cs336_systems.training.loop import Trainer
from cs336_systems.training.manifest import Manifest
from cs336_systems.training.state import collect_state, restore_state
from tests.distributed import run_ranks
from tests.training.helpers import (
    REST,
    VOCAB_SIZE,
    assert_same_tensors,
    checkpoint_path,
    forge_manifest,
    make_config,
    tiny_trainer,
    whole,
)
from tests.training.runs import resumed

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


def config_of(precision: str = "fp32", *, train: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    return make_config(
        Path("unused"),
        model=dict(d_ff=63),
        optimizer=dict(name="muon", lr=1e-2, muon_lr=2e-2, muon_momentum=0.9, warmup_steps=2),
        train=dict(batch_size=6, max_steps=STEPS, precision=precision, max_grad_norm=0.5) | (train or {}),
        parallel=parallel,
    )


def difference(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """How far two weights are from each other, as a share of their way from the start."""
    return float((found - expected).norm() / (expected - start).norm())


def test_orthogonalize_takes_singular_values_through_the_polynomial_to_about_1() -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in ((6, 40), (40, 6), (9, 9)):
        matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert 0.65 < s.min() <= s.max() < 1.21
        found = orthogonalize(100 * matrix.float())
        assert found.dtype == torch.bfloat16
        assert difference(found.double(), u @ s.diag() @ v, torch.zeros(())) < 2**-8


def test_matrices_are_orthogonalised_together_as_each_alone() -> None:
    """Each has its own norm."""
    generator = torch.Generator().manual_seed(2)
    for shape in ((6, 40), (40, 6), (33, 33)):
        matrices = torch.randn(2, 3, *shape, generator=generator) * torch.tensor([1e-3, 1.0, 1e3]).view(3, 1, 1)
        found = orthogonalize(matrices.bfloat16())
        assert found.shape == matrices.shape
        for i, j in np.ndindex(2, 3):
            alone = orthogonalize(matrices[i, j].bfloat16())
            assert difference(found[i, j].float(), alone.float(), torch.zeros(())) < 2**-8


def test_a_step_does_not_depend_on_how_many_matrices_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four matrices of 32 x 32, two of 63 x 32 and one of 32 x 63, of which one, two or all fit together."""
    shapes, weights = list[tuple[int, ...]](), []

    def computed(matrices: Tensor) -> Tensor:
        shapes.append(tuple(matrices.shape))
        return orthogonalize(matrices)

    monkeypatch.setattr("cs336_systems.training.muon.orthogonalize", computed)
    for most in (1, 2 * 32 * 32, 2**24):
        monkeypatch.setattr("cs336_systems.training.muon.BATCH", most)
        with tiny_trainer(config_of()) as trainer:
            start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            for _ in range(STEPS):
                trainer.train_step()
            weights.append({name: p.detach() for name, p in trainer.model.named_parameters()})
    square, tall, wide = (1, 32, 32), (1, 63, 32), (1, 32, 63)
    assert shapes[: 7 * STEPS] == STEPS * [*4 * [square], *2 * [tall], wide]
    assert shapes[7 * STEPS : -3 * STEPS] == STEPS * [*2 * [(2, 32, 32)], *2 * [tall], wide]
    assert shapes[-3 * STEPS :] == STEPS * [(4, 32, 32), (2, 63, 32), wide]
    for name, alone in weights[0].items():
        for together in weights[1:]:
            assert difference(together[name], alone, start[name]) < 0.01, name


def test_steps_are_those_of_torchs_muon_and_adamw() -> None:
    """With clipping, micro-batches and a schedule."""
    config = config_of(train=dict(gradient_accumulation_steps=2))
    settings = config.optimizer
    with tiny_trainer(config) as trainer:
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        model = copy.deepcopy(trainer.model)
        batches = [trainer.loader.get(6 * step, 6, 6) for step in range(STEPS)]
        rows = [trainer.train_step() for _ in range(STEPS)]
        found = {name: p.detach() for name, p in trainer.model.named_parameters()}
        momentum = [s["momentum_buffer"] for s in trainer.optimizer.state.values() if "momentum_buffer" in s]
    blocks = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim == 2]
    assert len(blocks) == 7
    rest = [p for p in model.parameters() if not any(p is block for block in blocks)]
    decay = dict(weight_decay=settings.weight_decay)
    muon = torch.optim.Muon(blocks, momentum=0.9, adjust_lr_fn="match_rms_adamw", **decay)
    groups = [{"params": [p for p in rest if p.ndim == 2], **decay}, {"params": [p for p in rest if p.ndim == 1]}]
    adamw = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    for (inputs, targets), row in zip(batches, rows, strict=True):
        for optimizer, lr in ((muon, 2 * row["lr"]), (adamw, row["lr"])):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
        halves = (slice(3), slice(3, 6))
        loss = torch.stack([cross_entropy(model(inputs[half]), targets[half]) for half in halves]).mean()
        assert loss.item() == pytest.approx(row["loss"], rel=1e-4)
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        muon.step()
        adamw.step()
    for name, p in model.named_parameters():
        assert difference(found[name], p.detach(), start[name]) < 0.02, name
    for buffer, block in zip(momentum, blocks, strict=True):
        assert difference(buffer, muon.state[block]["momentum_buffer"], torch.zeros(())) < 0.01


def test_the_blocks_alone_lower_the_loss() -> None:
    """A text in which each token says the next; AdamW's part stands still."""
    tokens = np.tile(np.random.default_rng(0).permutation(VOCAB_SIZE), 10).astype(np.uint16)
    settings = dict(name="muon", lr=1e-9, muon_lr=0.05)
    with tiny_trainer(make_config(Path("unused"), optimizer=settings, train=dict(max_steps=60)), tokens) as trainer:
        losses = [row["loss"] for row in trainer.train_steps(60)]
    assert losses[-1] < 4.6 < 5.6 < losses[0]


def test_a_matrix_is_orthogonalised_while_the_next_one_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    start, compute = comm.start_all_to_all, orthogonalize

    def started(*arguments: Any) -> comm.Transfer:
        events.append(arguments[-1].split()[0])
        return start(*arguments)

    def computed(matrix: Tensor) -> Tensor:
        events.append("compute")
        return compute(matrix)

    monkeypatch.setattr(comm, "start_all_to_all", started)
    monkeypatch.setattr("cs336_systems.training.muon.orthogonalize", computed)
    with tiny_trainer(config_of(strategy="fsdp")) as trainer:
        trainer.train_step()
    assert events == ["gather", *6 * ["gather", "compute", "scatter"], "compute", "scatter"]


# Several ranks, whose checkpoints any other run goes on from

WAYS: list[dict[str, Any]] = [
    dict(precision="bf16", strategy="overlap", shard_optimizer=True),
    dict(precision="fp32", strategy="fsdp"),
    dict(precision="bf16", strategy="fsdp_simple"),
    dict(precision="fp32", strategy="torch_fsdp"),
]


def checkpoint_of(trainer: Trainer, folder: Path) -> Path:
    shards = trainer.strategy.shards()
    tensors = collect_state(trainer.model, trainer.optimizer, trainer.device, shards)
    return save_checkpoint(folder, tensors, Manifest(step=STEPS, **REST))


def train_and_save(way: dict[str, Any], folder: Path) -> Path:
    with tiny_trainer(config_of(**way)) as trainer:
        for _ in range(STEPS):
            trainer.train_step()
        return checkpoint_of(trainer, folder)


def owners_of(trainer: Trainer) -> dict[str, int]:
    """The ranks that orthogonalise the matrices."""
    optimizer: Any = trainer.optimizer
    parameters = trainer.model.layers.named_parameters()
    return {f"model.layers.{name}": optimizer._owners[p] for name, p in parameters if p.ndim == 2}


def train_each(folder: Path, alone: Path) -> list[tuple[Path, Path, Path, dict[str, int]]]:
    """In each way train and save; then go on from the checkpoint of the way before, and save that.

    Returns the first checkpoint, the one gone on from, the second one, and the matrices' owners.
    """
    found = []
    source = alone
    for i, way in enumerate(WAYS):
        saved = train_and_save(way, folder / f"saved {i}")
        with tiny_trainer(config_of(**way)) as trainer:
            trainer.train_step()  # so that there is a state to be replaced
            restore_state(source, trainer.model, trainer.optimizer, trainer.device, trainer.strategy.shards())
            found.append((saved, source, checkpoint_of(trainer, folder / f"again {i}"), owners_of(trainer)))
        source = saved
    return found


def test_ranks_do_what_one_process_does_and_go_on_from_one_another(tmp_path: Path) -> None:
    """Neither the 7 matrices nor the 63 rows of some divide evenly."""
    alone = {p: train_and_save(dict(precision=p), tmp_path / p) for p in ("fp32", "bf16")}
    with tiny_trainer(config_of()) as trainer:
        start = {f"model.{name}": weight for name, weight in trainer.model.state_dict().items()}
    results = run_ranks(train_each, 2, tmp_path, alone["fp32"])[0]
    for way, (saved, source, again, owners) in zip(WAYS, results, strict=True):
        loads = [0, 0]
        for name, owner in owners.items():
            loads[owner] += orthogonalization_flops(*start[name].shape)
        assert max(loads) - min(loads) <= orthogonalization_flops(32, 32), "the smallest of 7"
        assert_same_tensors(whole(again), whole(source))
        expected, found = whole(alone[way["precision"]]), whole(saved)
        assert found.keys() == expected.keys()
        assert {name.rpartition(".")[2] for name in found if "layers.0.ffn" in name} == {"weight", "momentum_buffer"}
        for name in start:
            if "layers" in name and expected[name].ndim == 2:
                limit = dict(fp32=0.02, bf16=0.08)[way["precision"]]  # of 16-bit gradients
                assert difference(found[name], expected[name], start[name]) < limit, (way, name)


# Runs that are refused


def test_a_run_goes_on_only_with_its_own_optimizer(tmp_path: Path) -> None:
    for before, now in (("adamw", "muon"), ("muon", "adamw")):
        config = make_config(tmp_path, before, optimizer=dict(name=before), train=dict(max_steps=1))
        train(config)
        other = dataclasses.replace(config.optimizer, name=now)
        with pytest.raises(ValueError, match=f"step_00000001 is of another run: optimizer.name is '{now}' here and "
                           f"'{before}' there$"):  # fmt: skip
            train(resumed(config, optimizer=other))


def test_a_checkpoint_from_before_there_was_muon_is_adamws(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(max_steps=1))
    train(config)
    forge_manifest(checkpoint_path(config, 1), lambda manifest: manifest["identity"].pop("optimizer.name"))
    assert train(resumed(config, train=dataclasses.replace(config.train, max_steps=2))).step == 2
