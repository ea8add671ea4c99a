"""The case `bucket-size`: the planner's best size, the time that buckets add, and the prediction beside it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.bench.case import Case, configurations
from cs336_systems.bench.cases import bucket_size, ddp
from cs336_systems.bench.cases.bucket_size import CASE, BucketBench
from cs336_systems.bench.row import Row, append_row
from cs336_systems.cli import bench as bench_command
from cs336_systems.cli.bench import bench
from cs336_systems.planner.accounting import num_parameters
from cs336_systems.planner.cards import CARDS
from cs336_systems.planner.communication import all_reduce_cost
from cs336_systems.planner.rows import measured_overheads
from cs336_systems.report.plots import figure_of
from cs336_systems.report.strategy_tables import BUCKET_SIZE, with_added
from cs336_systems.report.views import rows_table

MIB = 2**20


def all_reduces(folder: Path, overhead_s: float, bandwidth: float, world_size: int = 2, backend: str = "gloo") -> str:
    """A row file of all-reduces that take o + bytes / w."""
    path = folder / "all-reduce.jsonl"
    for size in (10**4, 10**6, 10**8):
        config = {"bytes": size, "world_size": world_size, "backend": backend}
        metrics = {"time_ms": {"p50": (overhead_s + size / bandwidth) * 1e3}}
        append_row(path, Row(case="all-reduce", variant="v", config=config, metrics=metrics, env={}))
    return str(path)


def quick(*variants: str, **fields: Any) -> list[BucketBench]:
    return configurations(CASE, {"variant": variants, **{name: (value,) for name, value in fields.items()}}, quick=True)


def test_the_best_size_follows_from_the_rows(tmp_path: Path) -> None:
    rows = all_reduces(tmp_path, 1e-4, 1e9)
    (best,) = quick("bucketed:best", rows=rows)
    nbytes = 4 * num_parameters(best.model.shape)
    size = (nbytes * 1e9 * 1e-4) ** 0.5  # sqrt(s w o)
    assert float(best.variant.removeprefix("bucketed:")) == pytest.approx(size / MIB, abs=1e-3)
    (small,) = quick("bucketed:0.01", rows=rows)
    count = -(-nbytes // (0.01 * MIB))
    predicted = small.predicted()["predicted"]
    assert predicted["added_ms"] == pytest.approx(1e3 * (nbytes / count / 1e9 + count * 1e-4))
    assert predicted["best_mb"] == pytest.approx(size / MIB)


def test_steps_can_be_cuda_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ddp, bucket_size):
        monkeypatch.setattr(module, "select_device", torch.device)
    monkeypatch.setattr(ddp, "check_devices", lambda *_: None)
    rows = all_reduces(tmp_path, 1e-4, 1e9, backend="nccl")
    alone, best = quick("alone+graph", "bucketed:best+graph", rows=rows, device="cuda")
    assert alone.is_alone
    assert alone.run_config().train.cuda_graph
    assert best.run_config().train.cuda_graph
    assert best.bucket_size_mb == pytest.approx(best.predicted()["predicted"]["best_mb"], abs=1e-3)


def test_rows_of_other_ranks_or_backends_do_not_count(tmp_path: Path) -> None:
    for number, rows in enumerate([dict(world_size=4), dict(backend="nccl")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for variant in ("bucketed:best", "bucketed:1", "alone"):  # before measuring
            with pytest.raises(ValueError, match=r"^rows is .*: world_size is 2: the row file has no all-reduce"):
                quick(variant, rows=all_reduces(folder, 1e-4, 1e9, **rows))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^variant is 'bucketed:best': it must be bucketed:BUCKET_MB without rows"):
        quick("bucketed:best")
    assert quick("bucketed:1")[0].predicted() == {}


@pytest.mark.parametrize("lacking", ["bytes", "time_ms"])
def test_a_row_file_that_lacks_a_field_is_named(lacking: str, tmp_path: Path) -> None:
    path = Path(all_reduces(tmp_path, 1e-4, 1e9))
    path.write_text(path.read_text().replace(f'"{lacking}"', '"other"'))
    with pytest.raises(ValueError, match=rf"^rows is '{path}': there is no '{lacking}'$"):
        quick("bucketed:1", rows=str(path))


def test_the_command_uses_all_reduce_rows_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "cs336_systems")
    asked: list[BucketBench] = []

    def measure(case: Case, configs: list[BucketBench], path: Path, options: Any) -> list[Row]:
        asked[:] = configs
        path.unlink(missing_ok=True)
        append_row(path, Row(case="other", variant="v", config={}, env={}))
        return []

    def rows_of(*words: str) -> set[str]:
        assert bench(["bucket-size", "--quick", "--out", str(tmp_path), *words]) == 0
        return {config.rows for config in asked}

    monkeypatch.setattr(bench_command, "measure", measure)
    assert rows_of() == {""}
    assert "all-reduce.jsonl does not exist" in caplog.text
    caplog.clear()
    all_reduces(tmp_path, 1e-4, 1e9, world_size=4)
    assert rows_of() == {""}
    assert "world_size is 2: the row file has no all-reduce" in caplog.text
    caplog.clear()
    beside = all_reduces(tmp_path, 1e-4, 1e9)
    assert rows_of() == {beside}
    assert "goes without" not in caplog.text
    rows_of("--devices", "2", "3", "--variant", "bucketed:0.1")
    assert [(config.devices, config.rows) for config in asked] == [(2, beside), (3, "")]
    (tmp_path / "given").mkdir()
    given = all_reduces(tmp_path / "given", 1e-4, 1e9)
    assert rows_of("--rows", given) == {given}
    with pytest.raises(FileNotFoundError, match="gone"):
        rows_of("--rows", str(tmp_path / "gone"))


def test_a_ring_of_more_sends_more_and_a_call_costs_the_same() -> None:
    (two, four), card = (all_reduce_cost(CARDS["H200"], n) for n in (2, 4)), CARDS["H200"]
    assert two == (card.latency_s, card.link)
    assert four == (card.latency_s, card.link / 1.5)  # a rank sends 2 x 3 / 4 bytes per byte instead of 1


def made_up() -> list[Row]:
    def row(variant: str, bucket: float | None, ms: float, predicted_ms: float | None, **fields: Any) -> Row:
        config = {"size": "xl", "devices": 2, "compile": False, "bucket_size_mb": bucket, **fields}
        metrics: dict[str, Any] = {"step_ms": {"p50": ms, "p20": ms, "p80": ms}}
        metrics |= {} if predicted_ms is None else {"predicted": {"added_ms": predicted_ms, "best_mb": 40.0}}
        return Row(case="bucket-size", variant=variant, config=config, metrics=metrics, env={"gpu": "A"})

    return [row("alone", None, 100, None), row("bucketed:1", 1.0, 150, 40.0), row("bucketed:100", 100.0, 110, 8.0),
            row("bucketed:1", 1.0, 500, None, size="small")]  # fmt: skip


def test_added_time_compares_with_alone_at_the_same_setting() -> None:
    rows = with_added(made_up())
    assert [row.metrics.get("added_ms") for row in rows] == [None, 50, 10, None]
    assert rows[1].metrics["added"] == 0.5
    table = rows_table(made_up()[:3])
    assert "| 1 | 150.00 | 150.00 | 150.00 | 50.00 | +50.0% | 40.00 | 40 |" in table
    assert measured_overheads(made_up()[:3]) == [("eager", MIB, pytest.approx(0.05)), ("eager", 100 * MIB, 0.01)]


def test_the_plot_draws_prediction_and_measurement() -> None:
    (axes,) = figure_of(BUCKET_SIZE.plots[0], with_added(made_up()[:3])[1:], BUCKET_SIZE.keys).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert list(lines.values()) == [([1.0, 100.0], [50, 10]), ([1.0, 100.0], [40.0, 8.0])]


@pytest.mark.usefixtures("ranks_forked")
def test_sizes_take_turns_and_rows_have_the_run(tmp_path: Path) -> None:
    configs = configurations(CASE, {"rows": (all_reduces(tmp_path, 1e-4, 1e9),)}, quick=True)
    *first, _, _, _ = rows = list(CASE.measure(configs))
    assert [(row.variant, row.config["rounds"], len(row.metrics["steps_ms"])) for row in first] == [
        ("alone", 1, 2), ("bucketed:0.01", 1, 2), ("bucketed:0.1", 1, 2)]  # fmt: skip
    rows = rows[3:]
    assert [(row.variant, row.error) for row in rows] == [
        ("alone", None), ("bucketed:0.01", None), ("bucketed:0.1", None)]  # fmt: skip
    alone, small, large = rows
    assert [row.config["bucket_size_mb"] for row in rows] == [None, 0.01, 0.1]
    assert all(len(row.metrics["steps_ms"]) == 4 for row in rows)  # 2 steps in 2 rounds
    assert "predicted" not in alone.metrics
    # By hand, backwards through 300 x 32 + 2 blocks of (4 x 32^2 + 3 x 32 x 64 + 64) + 32 + 300 x 32 float32 numbers:
    # with buckets of 0.01 MiB (10,485 bytes) each matrix of 32 x 64 or more is a bucket, and two of 32 x 32 are one.
    assert small.metrics["buckets"] > 8 > large.metrics["buckets"] >= 2
    assert large.metrics["predicted"]["best_mb"] == small.metrics["predicted"]["best_mb"] > 0
    json.dumps([replace(row).metrics for row in rows])
