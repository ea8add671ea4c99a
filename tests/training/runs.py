"""Runs that end, stop, are copied and go on, for the tests of the whole job."""

import dataclasses
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cs336_systems.config.run import RunConfig
from cs336_systems.training import RunResult
from cs336_systems.training.loop import StartedStep, Trainer
from cs336_systems.training.manifest import verify_checkpoint
from cs336_systems.training.metrics import METRICS_FILE, read_metrics

from .helpers import assert_same_tensors, checkpoint_path, loss_rows, read_independently

EVERY_FIVE = dict(checkpointing_interval=5)


def resumed(config: RunConfig, resume: str | Path = "auto", **changes: Any) -> RunConfig:
    return dataclasses.replace(config, resume=str(resume), **changes)


def run_dir(config: RunConfig) -> Path:
    return Path(str(config.run_dir))


def copy_of(finished: RunConfig, tmp_path: Path) -> RunConfig:
    shutil.copytree(str(finished.run_dir), tmp_path / "run")
    return dataclasses.replace(finished, run_dir=str(tmp_path / "run"))


@dataclasses.dataclass
class End:
    """All that a run comes to."""

    tensors: dict[str, Tensor]
    sequences: int
    trainer: dict[str, Any]
    losses: list[dict[str, Any]]
    validations: list[dict[str, Any]]


def end_of(config: RunConfig, step: int = 10) -> End:
    path = checkpoint_path(config, step)
    manifest = verify_checkpoint(path)
    rows = read_metrics(run_dir(config) / METRICS_FILE)
    validations = [row for row in rows if "valid_loss" in row]
    return End(read_independently(path), manifest.sequences, manifest.trainer, loss_rows(config), validations)


def assert_same_end(one: End, other: End) -> None:
    assert_same_tensors(one.tensors, other.tensors)
    for name in ("sequences", "trainer", "losses", "validations"):
        assert getattr(one, name) == getattr(other, name), name


def stop_after(step: int, run: Callable[[], RunResult]) -> RunResult:
    """Run, with a SIGTERM to this process during that step."""
    finish_step = Trainer.finish_step

    def stopping(trainer: Trainer, started: StartedStep) -> dict[str, Any]:
        row = finish_step(trainer, started)
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "finish_step", stopping)
        return run()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
