"""The cases `optimizer-sharding` and `fsdp-accounting`: memory to the byte, counted by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases import sharding_memory
from cs336_systems.bench.instruments.memory_moments import AFTER, BEFORE, FORWARD, INITIALISED, MOMENTS, fullest
from cs336_systems.bench.row import Row, read_rows
from cs336_systems.report import memory_parts
from cs336_systems.report.views import rows_table
from tests.bench.conftest import Bench
from tests.distributed import run_ranks

# The quick model in float32: two matrices of 300 x 32; in each of 2 blocks four matrices of 32 x 32, three of 32 x 64
# and two norms of 32; the last norm. Each process has 2 sequences of 16 tokens.
MATRICES = 2 * 300 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64)
NORMS = 5 * 32
N = MATRICES + NORMS
TENSORS = 2 + 2 * 9 + 1
STEPS = 4 * TENSORS  # AdamW counts the steps of each tensor in 4 bytes


@pytest.mark.usefixtures("in_this_process", "ranks_forked")
def test_sharding_the_optimizer_saves_half_of_its_state(tmp_path: Path, bench: Bench) -> None:
    code, said, _ = bench("optimizer-sharding", "--quick", "--out", str(tmp_path))
    assert code == 0
    rows = read_rows(tmp_path / "optimizer-sharding.jsonl")
    assert [(row.variant, row.error) for row in rows] == [("overlap", None), ("overlap+zero1", None)]
    whole, sharded = (row.metrics for row in rows)
    for metrics in (whole, sharded):
        assert list(metrics["moments"]) == list(MOMENTS)
        for moment in metrics["moments"].values():
            assert sum(moment["parts"].values()) == moment["live_bytes"] <= moment["peak_bytes"]
        first, before = metrics["moments"][INITIALISED]["parts"], metrics["moments"][BEFORE]["parts"]
        assert (first["gradients"], first["optimizer_state"], before["gradients"]) == (0, 0, 4 * N)
        assert before == metrics["moments"][AFTER]["parts"]  # not the first step
        assert abs(before["other"]) < 3000  # rotary tables, the loss, flags
    assert whole["moments"][AFTER]["parts"]["parameters"] == 4 * N
    assert whole["ranks"]["optimizer_state_bytes"] == [8 * N + STEPS] * 2
    assert sum(sharded["ranks"]["optimizer_state_bytes"]) == 8 * N + STEPS
    # The parts of the ranks differ by no more than the largest tensor.
    one, other = sharded["ranks"]["optimizer_state_bytes"]
    assert abs(one - other) <= 8 * 300 * 32 + STEPS
    # The planner counts in units of 512 bytes, as a GPU's allocator does; each norm of 128 bytes takes one.
    rounding = TENSORS * 512
    for part in ("parameters", "gradients", "optimizer_state"):
        assert whole["predicted"][part] == pytest.approx(whole["moments"][AFTER]["parts"][part], abs=2 * rounding)
    left = whole["moments"][FORWARD]["parts"]["activations"]
    assert whole["predicted"]["activations"] == pytest.approx(left, rel=0.01)
    assert sharded["predicted"]["optimizer_state"] == whole["predicted"]["optimizer_state"] / 2
    assert "| overlap+zero1 | before the step |" in said
    assert (tmp_path / "optimizer-sharding.csv").is_file()
    assert (tmp_path / "optimizer-sharding-parts.png").read_bytes().startswith(b"\x89PNG")


def account(variants: tuple[str, ...]) -> list[Row]:
    configs = configurations(sharding_memory.FSDP_ACCOUNTING, {"variant": variants}, quick=True)
    return list(sharding_memory.measure_on_rank(configs, torch.device("cpu"), lambda config: None))


def test_fsdp_keeps_half_of_the_matrices_and_gathers_each_unit_in_each_pass() -> None:
    rows = run_ranks(account, 2, ("overlap", "fsdp"))[0]
    assert [row.error for row in rows] == [None, None]
    overlap, fsdp = (row.metrics["moments"] for row in rows)
    kept = 4 * (MATRICES // 2 + NORMS)
    assert fsdp[AFTER]["parts"]["parameters"] == fsdp[AFTER]["parts"]["gradients"] == kept
    assert fsdp[AFTER]["parts"]["optimizer_state"] == 2 * kept + STEPS
    # At the end of the forward pass only the head is unsharded, because backward begins with it.
    assert [moment["parts"]["gathered"] for moment in fsdp.values()] == [0, 4 * 300 * 32, 0, 0]
    # Both compute the same. gloo's thread may hold the four numbers of the last step's all-reduce a moment longer.
    activations = [moments[FORWARD]["parts"]["activations"] for moments in (fsdp, overlap)]
    assert abs(activations[0] - activations[1]) in (0, 4 * 4)
    assert min(activations) > 100_000
    assert rows[0].metrics["peak_memory_bytes"] > rows[1].metrics["peak_memory_bytes"]
    gathers = rows[1].metrics["gathers"]
    # lm_head stays unsharded between the passes, and the backward pass of the embedding needs no weights.
    assert [(each["unit"], each["turn"]) for each in gathers] == [
        ("token_embeddings", 1), ("layers.0", 1), ("layers.1", 1), ("lm_head", 1), ("layers.1", 2), ("layers.0", 2)
    ]  # fmt: skip
    assert all(each["ms"] > 0 for each in gathers)
    table = rows_table(rows)
    assert "all-gathers of a step end before their weights are needed" in table
    assert "| fsdp | predicted |" in table
    assert "| saved (GiB) |" in table


def test_a_strategy_unknown_to_the_planner_has_a_row_without_prediction() -> None:
    name = "tests.parallel.own_strategies:Gathering"
    rows = run_ranks(account, 2, (name, "flashddp"))[0]
    assert [(row.variant, row.error) for row in rows] == [(name, None), ("flashddp", None)]
    own, known = (row.metrics for row in rows)
    assert own.keys() == known.keys() - {"predicted"}
    assert known["predicted"]["gradients"] == pytest.approx(known["moments"][AFTER]["parts"]["gradients"], rel=0.01)
    table = rows_table(rows)
    assert f"| {name} | predicted |" not in table
    assert "| flashddp | predicted |" in table


def test_the_fullest_rank_and_the_slowest_count() -> None:
    def rank(peak: int, state: int, ms: float) -> dict[str, Any]:
        moment = {"live_bytes": 1, "peak_bytes": peak, "parts": {"optimizer_state": state}}
        return {"moments": {AFTER: moment}, "step_ms": {"p50": ms}, "steps_ms": [ms]}

    found = fullest([rank(7, 3, 2.0), rank(5, 4, 6.0)])
    assert found["peak_memory_bytes"] == 7
    assert found["moments"][AFTER]["parts"]["optimizer_state"] == 3
    assert found["ranks"] == {"peak_bytes": [7, 5], "optimizer_state_bytes": [3, 4]}
    assert (found["step_ms"]["p50"], found["spread_ms"]) == (6.0, 4.0)


def test_savings_compare_with_the_first_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_parts, "predicted_today", list)  # these rows have no run to predict

    def row(variant: str, gib: float, predicted: float) -> Row:
        parts = dict.fromkeys(("parameters", "gradients", "optimizer_state", "activations", "gathered", "other"), 0)
        moment = {"live_bytes": 1 << 30, "peak_bytes": int(gib * 2**30), "parts": parts | {"gradients": 1 << 30}}
        metrics = {"moments": dict.fromkeys(MOMENTS, moment), "peak_memory_bytes": gib * 2**30,
                   "predicted": {"peak": predicted * 2**30, "gradients": 2**30}, "step_ms": {"p50": 10.0}}  # fmt: skip
        config = {"devices": 2, "size": "xl", "context_length": 512, "batch_size": 4, "precision": "bf16",
                  "compile": False, "variant": variant}  # fmt: skip
        return Row(case="fsdp-accounting", variant=variant, config=config, metrics=metrics, env={"gpu": "A"})

    table = rows_table([row("overlap", 40, 42), row("fsdp", 20, 21)])
    assert "A; size xl; devices 2; context_length 512; batch_size 4; precision bf16; compile no:" in table
    assert "| overlap | 10.00 | 40 | 42 | +5.0% | - | - |" in table
    assert "| fsdp | 10.00 | 20 | 21 | +5.0% | 20 | 21 |" in table
    assert "| fsdp | after the step | 1 | 20 | 0 | 1 | 0 | 0 | 0 | 0 |" in table


@pytest.mark.multigpu
def test_on_gpus_the_allocator_agrees_with_the_count() -> None:
    given = {"device": ("cuda",), "size": ("small",), "context_length": (256,), "precision": ("bf16",)}
    rows = list(sharding_memory.CASE.measure(configurations(sharding_memory.CASE, given)))
    assert [row.error for row in rows] == [None, None]
    whole, sharded = (row.metrics["moments"][AFTER]["parts"] for row in rows)
    assert sharded["optimizer_state"] == pytest.approx(whole["optimizer_state"] / 2, rel=0.1)
    for row in rows:
        parts = row.metrics["moments"][AFTER]["parts"]
        assert 0 <= parts["other"] < 0.2 * row.metrics["moments"][AFTER]["live_bytes"]
        assert row.metrics["peak_memory_bytes"] == pytest.approx(row.metrics["predicted"]["peak"], rel=0.15)


@pytest.mark.multigpu
def test_on_gpus_the_gathers_of_fsdp_are_found_in_the_trace() -> None:
    given = {"device": ("cuda",), "size": ("small",), "context_length": (256,), "variant": ("fsdp",)}
    (row,) = sharding_memory.FSDP_ACCOUNTING.measure(configurations(sharding_memory.FSDP_ACCOUNTING, given))
    assert row.error is None
    # 12 blocks, embedding and head in forward; the blocks in backward.
    assert row.metrics["gathers_counted"] == 12 + 2 + 12
    assert all(0 < each["ms"] < 100 for each in row.metrics["gathers"])
