"""Activations in pinned memory, on a GPU: no bit changes, however slow the copies and however hungry the allocator."""

import dataclasses
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import TransformerLM
from cs336_systems.config.run import RunConfig
from cs336_systems.kernels.attention import get_attention
from cs336_systems.planner.memory import peak_bytes
from cs336_systems.planner.rows import training_job
from cs336_systems.training import offload, train
from cs336_systems.training.loop import Trainer
from cs336_systems.training.metrics import read_metrics
from cs336_systems.training.offload import Copier, host_memory
from tests.distributed import run_ranks

from .helpers import make_config, random_tokens
from .test_offload import RANKS, trained


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All activations of tiny models count as large."""
    monkeypatch.setattr(offload, "SMALLEST_OFFLOADED", 1)


class SlowCopier(Copier):
    """Its copies begin long after they could."""

    def start(self, pairs: Any) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)  # a millisecond: longer than a block takes
        return super().start(pairs)


slow_copier_of = functools.cache(SlowCopier)
PINNED: list[Tensor] = []
"""Memory that was pinned for a single model, which must not be freed."""


def crowd(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """After a block's forward pass and before its backward pass: take memory of all sizes and overwrite it."""

    def overwrite(_: Tensor | None = None) -> None:
        taken = [torch.full((2**i,), torch.nan, device="cuda") for i in range(12, 21) for _ in range(8)]
        del taken

    overwrite()
    output.register_hook(overwrite)


def losses_on_gpu(folder: Path, is_crowded: bool, **how: Any) -> list[Any]:
    """Losses and gradient norms of five steps. Recorded ones are replayed from the third on."""
    torch._dynamo.reset()
    model = dict(d_model=128, d_ff=256, context_length=128, num_layers=5, attention="flash_triton")
    settings = dict(batch_size=8, device="cuda", precision="bf16") | how
    trainer = trainer_on_gpu(make_config(folder, model=model, train=settings))
    torch.use_deterministic_algorithms(True)
    try:
        for layer in trainer.model.layers if is_crowded else ():
            layer.register_forward_hook(crowd)
        rows = [trainer.train_step() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
        trainer.close()
    return [(row["loss"], row["grad_norm"]) for row in rows]


def trainer_on_gpu(config: RunConfig) -> Trainer:
    torch.manual_seed(0)
    attention = get_attention(config.model.attention)
    built = TransformerLM(**dataclasses.asdict(config.model.shape), attention=attention).to("cuda")
    return Trainer(config, built, random_tokens(20_000), "cuda")


@pytest.mark.usefixtures("small")
@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("policy", ["none", "first_1", "groups_2", "block_but_attention"])
def test_slow_copies_between_hungry_allocations_change_no_bit(
    policy: str, compile: bool, cuda_graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    how = dict(activation_checkpointing=policy, compile=compile, cuda_graph=cuda_graph)
    truth = losses_on_gpu(tmp_path, False, **how)
    monkeypatch.setattr(offload, "copier_of", slow_copier_of)
    for count in (2, 4):
        assert losses_on_gpu(tmp_path, True, activation_offload=f"first_{count}", **how) == truth


@pytest.mark.usefixtures("small")
@pytest.mark.gpu
def test_micro_batches_of_a_recorded_step_share_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(offload, "copier_of", SlowCopier)
    monkeypatch.setattr(offload, "host_memory", lambda n, **how: PINNED.append(host_memory(n, **how)) or PINNED[-1])
    found = []
    for batch_size, accumulation in ((2, 1), (8, 4)):
        how = dict(batch_size=batch_size, gradient_accumulation_steps=accumulation, cuda_graph=True)
        before = len(PINNED)
        losses = losses_on_gpu(tmp_path, True, activation_offload="first_3", **how)
        assert losses == losses_on_gpu(tmp_path, False, **how)
        assert all(buffer.is_pinned() for buffer in PINNED[before:])
        found.append(sorted(buffer.numel() for buffer in PINNED[before:]))
    assert found[0] == found[1] != []


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("policy", ["none", "block"])
def test_the_peak_is_as_planned(policy: str, cuda_graph: bool, tmp_path: Path) -> None:
    """Within 5 %, which is the planner's aim. Plain blocks make it fall by as much as planned, within 10 %."""
    model = dict(d_model=1024, d_ff=4096, num_heads=16, context_length=1024, num_layers=12, attention="sdpa")
    how = dict(batch_size=24, precision="bf16", activation_checkpointing=policy, device="cuda", compile=False)
    found = []
    for offloaded in ("none", "first_8"):
        gc.collect()
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        train = how | dict(activation_offload=offloaded, cuda_graph=cuda_graph)
        trainer = trainer_on_gpu(make_config(tmp_path, model=model, train=train))
        for _ in range(3):  # the third is recorded
            torch.cuda.reset_peak_memory_stats()
            trainer.train_step()
        measured = trainer.peak_memory_bytes() - others
        planned = peak_bytes(training_job("train-step", "", trainer.config.to_dict()))
        trainer.close()
        del trainer
        found.append((measured, planned))
    for measured, planned in found:
        assert measured == pytest.approx(planned, rel=0.05)
    (before, planned_before), (after, planned_after) = found
    assert after < before
    if policy == "none":
        assert before - after == pytest.approx(planned_before - planned_after, rel=0.1)


@pytest.mark.gpu
def test_auto_offloads_nothing_where_all_fits_and_the_step_is_recorded(tmp_path: Path) -> None:
    how = dict(device="cuda", precision="bf16", activation_offload="auto")
    trainer = trainer_on_gpu(make_config(tmp_path, model=dict(attention="sdpa"), train=how))
    trainer.close()
    assert (trainer.config.train.activation_offload, trainer.config.train.cuda_graph) == ("none", True)


@pytest.mark.usefixtures("small")
@pytest.mark.gpu
def test_an_offloading_run_trains_validates_and_samples(tmp_path: Path) -> None:
    how = dict(device="cuda", precision="bf16", activation_offload="first_1", activation_checkpointing="block")
    result = train(make_config(tmp_path, model=dict(num_layers=2), train=how))
    rows = read_metrics(Path(result.run_dir) / "metrics.jsonl")
    assert len([row for row in rows if "loss" in row]) == 10
    assert result.valid_loss is not None


@pytest.mark.multigpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("parallel", [parallel for parallel, _ in RANKS[:4]], ids=str)
def test_two_gpus_learn_the_same(parallel: dict[str, Any], cuda_graph: bool) -> None:
    train = dict(batch_size=8, gradient_accumulation_steps=2, precision="bf16", cuda_graph=cuda_graph, device="cuda")
    groups = [
        dict(parallel=parallel, model=dict(num_layers=4), train=train | {"activation_offload": policy})
        for policy in ("none", "first_2")
    ]
    for (_, losses), (_, same_losses) in run_ranks(trained, 2, groups, "cuda", 5, device="cuda"):
        assert same_losses == pytest.approx(losses, rel=1e-3)
