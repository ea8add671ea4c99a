"""The fields that are decided for the device: compilation, and the recorded step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.training import auto
from cs336_systems.training.auto import resolve

from .helpers import make_config, tiny_trainer

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "device_peak_flops", lambda device, precision: 1e12)


def test_a_cpu_neither_compiles_nor_records(tmp_path: Path) -> None:
    with tiny_trainer(make_config(tmp_path, train=dict(max_steps=10**9))) as trainer:
        assert (trainer.config.train.compile, trainer.config.train.cuda_graph) == (False, False)
        assert trainer._recorded is None


def test_a_gpu_compiles_what_takes_long(tmp_path: Path) -> None:
    flops_a_step = auto.training_flops(make_config(tmp_path).model.shape, 4, 16)
    enough = auto.COMPILATION_PAYS_AFTER_S * auto.USUAL_MFU * 1e12 / flops_a_step
    for steps, expected in ((int(0.99 * enough), False), (int(1.01 * enough), True)):
        assert resolve(make_config(tmp_path, train=dict(max_steps=steps)), GPU).train.compile is expected


def test_a_share_of_activations_is_kept_only_by_the_compiler(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(compile_memory_budget=0.5))
    assert resolve(config, torch.device("cpu")).train.compile is True


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_asked_for_stays(asked: bool, tmp_path: Path) -> None:
    train = resolve(make_config(tmp_path, train=dict(compile=asked, cuda_graph=asked, max_steps=10**9)), GPU).train
    assert (train.compile, train.cuda_graph) == (asked, asked)


@pytest.mark.parametrize(
    "groups, named",
    [
        (dict(), None),
        (dict(parallel=dict(strategy="fsdp", devices=2)), None),
        (dict(parallel=dict(strategy="torch_fsdp", devices=2)), "parallel.strategy is torch_fsdp"),
        (dict(parallel=dict(strategy="torch_ddp", devices=2)), "parallel.strategy is torch_ddp"),
        (dict(parallel=dict(strategy="mine:Own", devices=2)), "parallel.strategy is mine:Own"),
        (dict(model=dict(attention="mine:own")), "model.attention is mine:own"),
        (dict(model=dict(attention="flash_torch")), None),
        (dict(model=dict(attention="flash_torch", window=4)), "model.attention is flash_torch"),
        (dict(model=dict(attention="fa4", window=4)), None),
        (dict(model=dict(attention="fa4"), data=dict(documents=True, source="stories")), "model.attention is fa4"),
        (dict(model=dict(attention="flash_triton", window=4), data=dict(documents=True, source="stories")), None),
    ],
)
def test_a_gpu_records_all_but_code_that_may_wait_for_it(
    groups: dict[str, Any], named: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(make_config(tmp_path, **groups), GPU).train.cuda_graph is (named is None)
    assert caplog.messages == ([] if named is None else [caplog.messages[0]])
    assert named is None or named in caplog.messages[0]
