"""The case `checkpointing`: memory equals the count, and groups trade it as they should."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.case import configurations
from cs336_systems.bench.cases.checkpointing import CASE, CheckpointingBench, _counted
from cs336_systems.bench.instruments.live_bytes import LiveBytes
from cs336_systems.bench.row import Row
from cs336_systems.report.plots import figure_of
from cs336_systems.report.spec import Column, Plot
from cs336_systems.report.views import rows_table, write_views

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = dict(size="quick", num_layers=8, batch_size=2, context_length=16, precision="fp32", device="cpu")


def measured(policy: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    how = dict(attention="naive", warmup=0, steps=1, activation_checkpointing=policy)
    (row,) = CASE.measure([CheckpointingBench(**{**QUICK, **how, **fields})])
    assert row.error is None
    return row.config, row.metrics


# Memory


@pytest.mark.parametrize("fields", [dict(), dict(precision="bf16", context_length=64, vocab_size=50)], ids=str)
@pytest.mark.parametrize("policy", ["none", "block", "every_3", "groups_3", "groups_8"])
def test_measured_memory_equals_the_count(policy: str, fields: dict[str, Any]) -> None:
    _, metrics = measured(policy, **fields)
    assert metrics["held_bytes"] == metrics["predicted_held_bytes"] + 4  # the loss
    assert metrics["peak_bytes"] == pytest.approx(metrics["predicted_bytes"], rel=0.05)


@pytest.mark.parametrize("policy", ["block_but_attention", "first_3_but_attention"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_measured_memory_with_attentions_outputs_equals_the_count(precision: str, policy: str) -> None:
    how = dict(attention="flash_torch", precision=precision, context_length=64, vocab_size=50)
    ran, metrics = measured(policy, **how)
    assert metrics["held_bytes"] == metrics["predicted_held_bytes"] + 4  # the loss
    assert metrics["peak_bytes"] == pytest.approx(metrics["predicted_bytes"], rel=0.05)
    assert (ran["policy"], ran["K"]) == {"b": ("every_but_attention", 1), "f": ("first_but_attention", 3)}[policy[0]]


def test_groups_keep_their_inputs_only() -> None:
    """8 blocks keep 8 inputs; in groups of 2, 3 and 8 they keep 4, 3 and 1."""
    kept = {k: measured(f"groups_{k}")[1]["held_bytes"] for k in (1, 2, 3, 8)}
    entry = 2 * 16 * 32 * 4
    assert kept[1] - kept[2] == 4 * entry
    assert kept[2] - kept[3] == entry
    assert kept[3] - kept[8] == 2 * entry


def test_the_first_block_alone_is_not_called_every_block() -> None:
    named = {policy: measured(policy)[0]["policy"] for policy in ("block", "first_1")}
    assert named == {"block": "groups", "first_1": "first"}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["none", "groups_3"])
def test_on_a_gpu_the_allocator_holds_the_counted_bytes(policy: str, precision: str) -> None:
    # Enough tokens that the gradient of a weight, which is not counted, is smaller than that of an activation.
    how = dict(size="small", context_length=512, attention="flash_triton", precision=precision, device="cuda", warmup=1)
    _, metrics = measured(policy, **how)
    assert metrics["held_bytes"] == pytest.approx(metrics["predicted_held_bytes"], rel=0.02)
    assert metrics["peak_bytes"] == pytest.approx(metrics["predicted_bytes"], rel=0.02)


def test_live_bytes_by_hand() -> None:
    before = torch.ones(100)
    with LiveBytes() as live:
        x = before + 1
        assert live.now == 400
        view = x.view(10, 10)
        del x
        view.add_(1)
        before.add_(1)
        assert live.now == 400  # the view keeps it; the in-place operation adds nothing
        other = torch.zeros(50, dtype=torch.bfloat16)
        assert live.now == 500
        other.untyped_storage().resize_(0)
        assert (live.now, live.peak) == (400, 500)
        other.untyped_storage().resize_(200)
        del view
        assert (live.now, live.peak) == (200, 500)
    del other
    assert (live.now, live.peak) == (0, 500)
    live.restart()
    assert live.peak == 0


def test_live_bytes_of_a_backward_pass_by_hand() -> None:
    x = torch.ones(1000, requires_grad=True)
    x.grad = torch.zeros(1000)
    with LiveBytes() as live:
        y = x.exp().sum()
        assert live.now == 4000 + 4  # exp saves its result
        y.backward()
        # The product of exp's output and the gradient (an expanded number), that number, and the loss.
        assert live.peak == 4000 + 4 + 4 + 4000
        del y
    assert live.now == 0


# Rows


def test_a_row_has_policy_and_number() -> None:
    ran, _ = measured("groups_3")
    assert (ran["policy"], ran["K"], ran["num_layers"]) == ("groups", 3, 8)
    ran, _ = measured("block", num_layers=None)
    assert (ran["policy"], ran["K"], ran["num_layers"]) == ("groups", 1, 2)
    ran, metrics = measured("none")
    assert (ran["policy"], ran["K"]) == ("none", None)
    assert metrics["step_ms"]["p50"] > 0


def test_unknown_kernels_and_compiled_blocks_have_no_prediction() -> None:
    for fields in (dict(compile=True, attention="naive"), dict(attention="vectorized_torch")):
        assert _counted(CheckpointingBench(**{**QUICK, **fields})) == {}


def test_groups_larger_than_the_model_are_left_out() -> None:
    found = configurations(CASE, {"num_layers": (4,), "attention": ("naive",), "device": ("cpu",)})
    policies = "none block every_2 every_4 groups_2 groups_3 groups_4"
    assert [config.activation_checkpointing for config in found] == policies.split()


# Tables and plots


def test_a_quick_run_has_a_table_and_plots(tmp_path: Path) -> None:
    """Some of its policies, one step each, because steps take long."""
    given = {"activation_checkpointing": ("none", "block", "every_2", "groups_3"), "warmup": (0,), "steps": (1,)}
    rows = list(CASE.measure(configurations(CASE, given, quick=True)))
    assert [row.status for row in rows] == ["ok"] * 4
    table = rows_table(rows)
    assert "num_layers 8" in table
    lines = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith(("| none", "| gr", "| ev"))]
    assert lines == [["| none", "-"], ["| groups", "1"], ["| every", "2"], ["| groups", "3"]]
    names = {path.name for path in write_views(rows, tmp_path)}
    assert {"checkpointing.md", "checkpointing.csv", "checkpointing-peak.png", "checkpointing-step.png"} == names
    assert (tmp_path / "checkpointing-peak.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_has_a_line_for_the_prediction_and_a_level_for_none() -> None:
    plot = Plot(name="p", y=Column("y", "y"), x="K", lines=("policy",), beside=Column("z", "z"))
    values = {("none", None): (9.0, None), ("g", 1): (4.0, 5.0), ("g", 8): (6.0, 7.0), ("g", 2): (3.0, 4.0)}
    rows = [
        Row(case="checkpointing", variant="v", config={"policy": policy, "K": k}, metrics={"y": y, "z": z}, env={})
        for (policy, k), (y, z) in values.items()
    ]
    axes = figure_of(plot, rows, ()).axes[0]
    found = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert found["g"] == ([1, 2, 8], [4.0, 3.0, 6.0])
    assert found["g, predicted"] == ([1, 2, 8], [5.0, 4.0, 7.0])
    assert found["none"][1] == [9.0, 9.0]
    assert "none, predicted" not in found
