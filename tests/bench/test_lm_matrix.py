"""The case `lm-matrix`: strategies reach the same loss, another loss is an error, and the files report it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cs336_basics.data import write_tokens
from cs336_systems.bench.case import configurations, groups
from cs336_systems.bench.cases import lm_matrix as case
from cs336_systems.bench.cases.lm_matrix import CASE, LMMatrixBench
from cs336_systems.bench.row import read_rows
from cs336_systems.config.run import RunConfig
from cs336_systems.report.outputs import RECORD
from cs336_systems.training.pipeline import train, train_on
from cs336_systems.training.result import RunResult
from tests.bench.conftest import Bench
from tests.distributed import run_ranks
from tests.training.helpers import make_config, random_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = (".md", ".csv", "-time.png", "-memory.png", "-throughput.png")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, tuple[str]]:
    """Token files of 1000 and 200 tokens."""
    for name, count in (("train", 1000), ("valid", 200)):
        tokens = random_tokens(count, seed=count)
        write_tokens(tmp_path / f"{name}.npy", lambda _, tokens=tokens: [tokens], 300, source="test", inputs={})
    return {"train_path": (str(tmp_path / "train.npy"),), "val_path": (str(tmp_path / "valid.npy"),)}


def quick(given: dict[str, Any]) -> list[LMMatrixBench]:
    return configurations(CASE, given, quick=True)


def test_one_and_two_processes_reach_the_loss_of_the_training_loop(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Starting processes is tested elsewhere.
    monkeypatch.setattr(case, "launch", lambda run: run_ranks(train_on_rank, run.parallel.devices, run)[0])
    rows = list(CASE.measure(quick(files)))
    assert [(row.variant, row.status, row.error) for row in rows] == [
        ("sdpa none", "ok", None), ("sdpa flashddp", "ok", None)
    ]  # fmt: skip
    same = make_config(
        tmp_path, skip_data=True, model=dict(num_layers=2, attention="sdpa"), train=dict(max_steps=8, batch_size=4),
        optimizer=dict(lr=1e-3, warmup_steps=0, implementation="torch"),
        data=dict(train_tokens=files["train_path"][0], valid_tokens=files["val_path"][0]),
    )  # fmt: skip
    expected = train(make_long_enough(same))
    for row in rows:
        assert row.metrics["final_loss"] == pytest.approx(expected.valid_loss, rel=1e-5)
        assert row.metrics["train_loss"] == pytest.approx(expected.train_loss, rel=1e-5)
        assert (row.metrics["steps"], row.metrics["train_tokens"]) == (8, 1000)
        assert row.metrics["peak_memory_bytes"] > 0
    assert [row.config["run"]["parallel"]["devices"] for row in rows] == [1, 2]
    assert rows[1].metrics["loss_difference"] < 1e-4


def train_on_rank(run: RunConfig) -> RunResult:
    return train_on(run, torch.device("cpu"))


def make_long_enough(config: RunConfig) -> RunConfig:
    """The loss on all sequences of the validation file, as in the case."""
    values = config.to_dict()
    values["train"] |= {"validation_sequences": 256, "validation_interval": 0}
    return RunConfig.from_dict(values)


Launch = Callable[[RunConfig], Any]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Final losses by strategy of fake runs whose steps take 100 ms. An exception among them is raised."""
    found: dict[str, Any] = {}

    def pretend(run: RunConfig) -> Any:
        strategy = run.parallel.strategy
        loss = found.get(strategy, 2.0)
        if isinstance(loss, Exception):
            raise loss
        norms = found.get(f"{strategy}'s gradient norms", {})
        folder = Path(str(run.run_dir))
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(run.to_dict()))
        steps = run.train.max_steps
        of_step = {"loss": 2.0, "step_ms": 100.0}
        lines = [{"step": i, "grad_norm": norms.get(i, 3.0), **of_step} for i in range(1, steps + 1)]
        lines.append({"step": steps, "valid_loss": loss})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return SimpleNamespace(
            valid_loss=loss, train_loss=2.0, step=steps, step_ms={"p50": 100.0}, tokens_per_s=640.0, startup_s=1.0,
            peak_memory_bytes=1 << 30, mfu=None, interrupted=None,
        )  # fmt: skip

    monkeypatch.setattr(case, "launch", pretend)
    return found


def test_another_loss_is_an_error(files: Any, losses: dict[str, Any]) -> None:
    losses |= {"naive": 2.0009, "flashddp": 2.0011, "torch_ddp": float("nan")}
    rows = list(CASE.measure(quick(files | {"strategy": ("naive", "flashddp", "torch_ddp", "none")})))
    assert [(row.config["strategy"], row.status) for row in rows] == [
        ("none", "ok"), ("naive", "ok"), ("flashddp", "error"), ("torch_ddp", "error")
    ]  # fmt: skip
    assert rows[2].error == ("final_loss is 2.0011 with strategy flashddp, and 2 with none: they must be within 0.001")
    assert "final_loss is nan" in str(rows[3].error)


@pytest.mark.parametrize("norms, status", [({4: 3.029}, "ok"), ({4: 2.969}, "error"), ({6: 9.0}, "ok")])
def test_the_first_gradients_are_compared_more_closely(
    norms: dict[int, float], status: str, files: Any, losses: dict[str, Any]
) -> None:
    losses["naive's gradient norms"] = norms
    _, row = CASE.measure(quick(files | {"strategy": ("none", "naive")}))
    assert row.status == status
    assert ("gradient norm of step 4 is 2.969 with strategy naive" in str(row.error)) == (status == "error")
    assert row.metrics["norm_difference"] == pytest.approx(abs(norms.get(4, 3.0) / 3 - 1))


def test_steps_in_which_float16_overflowed_are_not_compared(files: Any, losses: dict[str, Any]) -> None:
    losses["naive's gradient norms"] = {1: None, 2: 3.003}
    _, row = CASE.measure(quick(files | {"strategy": ("none", "naive")}))
    assert (row.status, row.metrics["norm_difference"]) == ("ok", pytest.approx(0.001))


def test_without_a_row_of_one_process_a_reference_is_trained(files: Any, losses: dict[str, Any]) -> None:
    losses |= {"naive": 2.5, "flashddp": 2.0}
    rows = list(CASE.measure(quick(files | {"strategy": ("naive", "flashddp")})))
    assert [(row.config["strategy"], row.status) for row in rows] == [("naive", "error"), ("flashddp", "ok")]
    assert rows[0].error == "final_loss is 2.5 with strategy naive, and 2 with none: they must be within 0.001"


def test_if_the_first_run_fails_the_next_is_the_reference(files: Any, losses: dict[str, Any]) -> None:
    losses |= {"none": RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "torch_ddp": 3.0}
    rows = list(CASE.measure(quick(files | {"strategy": ("none", "naive", "torch_ddp")})))
    assert [row.status for row in rows] == ["oom", "ok", "error"]
    assert "and 2 with naive" in str(rows[2].error)


def test_an_error_of_the_run_names_the_option(files: Any, losses: dict[str, Any]) -> None:
    losses["none"] = ValueError("model.attention is 'sdpa', which cannot be used here: q is on cpu")
    (row,) = CASE.measure(quick(files | {"strategy": ("none",)}))
    assert row.error == "ValueError: kernel is 'sdpa', which cannot be used here: q is on cpu"


def test_epochs_are_as_many_tokens_as_the_file_has(files: Any, losses: dict[str, Any]) -> None:
    def metrics(**fields: Any) -> dict[str, Any]:
        given = files | {name: (value,) for name, value in fields.items()}
        (row,) = CASE.measure(quick(given | {"strategy": ("none",)}))
        return row.metrics

    whole = metrics(epochs=3, max_steps=1000)
    assert whole["steps"] == 3 * (1000 // (4 * 16))
    assert whole["epoch_s"] == pytest.approx(0.1 * (1000 // (4 * 16)))
    assert metrics(epochs=3, max_steps=7)["steps"] == 7
    assert metrics(epochs=1, batch_size=100, max_steps=1000)["steps"] == 1


def test_the_default_matrix_takes_turns_by_kernel() -> None:
    configs = configurations(CASE, {"device": ("cpu",)})
    assert {config.kernel for config in configs} == {"naive", "vectorized_torch", "flash_triton", "sdpa"}
    assert [config.strategy for config in groups(CASE, configs)[0]] == ["none", "naive", "flashddp", "torch_ddp"]


def test_a_shape_replaces_the_size() -> None:
    shape = dict(d_model=64, d_ff=128, num_layers=3, num_heads=4)
    config = LMMatrixBench(device="cpu", **shape)
    assert config.size is None
    assert {name: getattr(config.model_config(), name) for name in shape} == shape


@pytest.mark.usefixtures("in_this_process")
def test_the_command_writes_the_files(files: Any, losses: dict[str, Any], tmp_path: Path, bench: Bench) -> None:
    losses["torch_ddp"] = 2.5
    out = tmp_path / "out"
    paths = ["--train_path", *files["train_path"], "--val_path", *files["val_path"]]
    arguments = ["--kernels", "naive", "sdpa", "--strategies", "none", "flashddp", "torch_ddp", *paths]
    code, said, _ = bench("lm-matrix", "--quick", *arguments, "--out", str(out))
    assert code == 0
    files = {"lm-matrix.jsonl", RECORD, *(f"lm-matrix{name}" for name in FILES)}
    assert {path.name for path in out.iterdir()} == files
    assert [row.status for row in read_rows(out / "lm-matrix.jsonl")] == ["ok", "ok", "error"] * 2
    table = (out / "lm-matrix.md").read_text()
    assert "- failed: final_loss is 2.5 with strategy torch_ddp" in table
    assert "| naive | flashddp | 2.00000 | 0.0e+00 | 0.0e+00 | 2.00000 | 8 | 1.5 |" in table
    assert len((out / "lm-matrix.csv").read_text().splitlines()) == 7
    assert "failed" in said


@pytest.mark.parametrize("option", ["train_path", "val_path"])
def test_a_row_names_an_unfit_token_file(option: str, files: Any, losses: dict[str, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "wide.npy", np.full(100, 300, np.uint16))
    (row,) = CASE.measure(quick(files | {option: (str(tmp_path / "wide.npy"),), "strategy": ("none",)}))
    assert row.status == "error"
    assert "wide.npy has ID 300" in str(row.error)


def test_a_quick_run_takes_the_given_vocabulary() -> None:
    (config,) = quick({"vocab_size": (400,), "strategy": ("none",)})
    assert config.model_config().shape.vocab_size == 400


def test_one_process_needs_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(case, "check_devices", lambda device, count: counts.append(count))
    for strategy in ("none", "naive"):
        LMMatrixBench(device="cpu", strategy=strategy, devices=3, batch_size=6)
    assert counts == [1, 3]
