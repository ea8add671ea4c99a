"""The case `leaderboard-2026`: the leaderboard's configuration runs, and its loss is the model's."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cs336_basics.data import token_dtype
from cs336_basics.model import TransformerLM
from cs336_systems.bench.case import configurations, row_config
from cs336_systems.bench.cases.leaderboard_2026 import CASE, Leaderboard2026Bench, read_back
from cs336_systems.bench.row import Row
from cs336_systems.config.run import ParallelConfig
from cs336_systems.planner.accounting import num_parameters
from cs336_systems.planner.rows import job_of
from cs336_systems.report.views import rows_table
from cs336_systems.training.batches import BatchLoader
from tests.training.helpers import random_tokens, tiny_trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def quick(**fields: Any) -> Leaderboard2026Bench:
    given = {name: (value,) for name, value in {"strategy": "fsdp", **fields}.items()}
    (config,) = configurations(CASE, given, quick=True)
    return config


def test_the_model_is_the_leaderboards() -> None:
    (config,) = configurations(CASE)
    shape = config.run_config().model.shape
    assert (shape.d_model, shape.d_ff, shape.num_layers, shape.num_heads) == (4096, 11008, 34, 32)
    assert (shape.vocab_size, shape.context_length) == (151_936, 32_768)
    assert num_parameters(shape) == 8_125_698_048
    assert (config.batch_size * config.devices, config.devices, config.precision) == (2, 2, "bf16")
    assert config.run_config().optimizer.implementation == "torch_fused"


def plain_loss(config: Leaderboard2026Bench) -> float:
    """The loss of the first step on one process with all logits, for the ranks' model and batch."""
    run = replace(config.run_config(), parallel=ParallelConfig())
    shape = run.model.shape
    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 1 << 20).astype(token_dtype(shape.vocab_size))
    torch.manual_seed(0)
    model = TransformerLM(**asdict(shape))
    loader = BatchLoader(tokens, shape.context_length, run.train.seed, torch.device("cpu"))
    inputs, targets = loader.get(0, run.train.batch_size)
    loader.close()
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


def check_row(config: Leaderboard2026Bench, row: Row, rel: float) -> None:
    assert (row.status, row.error) == ("ok", None)
    assert {name: row.config[name] for name in row_config(config)} == row_config(config)
    assert (row.config["num_layers"], row.config["checkpointed_blocks"]) == (2, 1)
    assert row.metrics["first_loss"] == pytest.approx(plain_loss(config), rel=rel)
    assert len(row.metrics["steps_ms"]) == config.steps
    assert "median and mean of 2 calls of Trainer.train_step" in row.metrics["timer"]
    tokens = 2 * config.context_length
    assert row.metrics["tokens_per_s"] == pytest.approx(tokens / row.metrics["step_ms"]["p50"] * 1e3)
    other = {"fsdp": "torch_fsdp", "torch_fsdp": "fsdp"}[config.strategy]
    table = rows_table([row, replace(row, config=row.config | {"strategy": other})])
    mean = sum(row.metrics["steps_ms"]) / config.steps
    assert "| strategy | step (ms) | mean (ms) |" in table
    assert f"| {config.strategy} | {row.metrics['step_ms']['p50']:.2f} | {mean:.2f} |" in table
    assert table.count("gradient norm, clipping, AdamW") == 1  # the handout's step lacks some of these


@pytest.mark.usefixtures("ranks_forked")
def test_two_ranks_measure_the_configured_step() -> None:
    config = quick(precision="fp32", weight_dtype="fp32")
    (row,) = CASE.measure([config])
    check_row(config, row, rel=1e-5)
    job = job_of(row)
    assert (job.strategy, job.world_size, job.batch_size, job.loss_chunk_tokens) == ("fsdp", 2, 1, 5)
    assert job.checkpointing == ("first", 1)


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ["fsdp", "torch_fsdp"])
def test_two_gpus_measure_the_step_compiled_and_in_bfloat16(strategy: str) -> None:
    config = quick(
        strategy=strategy, device="cuda", compile=True, compile_memory_budget=0.75, context_length=128,
        loss_chunk_tokens=64,
    )  # fmt: skip
    (row,) = CASE.measure([config])
    check_row(config, row, rel=0.01)


def test_the_row_is_read_back_from_the_trainer(tmp_path: Any) -> None:
    config = quick(devices=1, batch_size=3, activation_checkpointing="block")
    with tiny_trainer(config.run_config(), random_tokens(1000)) as trainer:
        found = read_back(trainer)
        asked = row_config(config)
        assert {name: value for name, value in found.items() if name in asked} == {
            name: value for name, value in asked.items() if name in found
        }
        assert found["checkpointed_blocks"] == 2
        trainer.model.float()
        trainer.model.lm_head.loss = nn.functional.cross_entropy
        assert read_back(trainer) == found | {"weight_dtype": "fp32", "loss_chunk_tokens": None}
