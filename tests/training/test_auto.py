"""The fields that are decided for the device: compilation, and the recorded step."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cs336_systems.parallel import comm
from cs336_systems.training import auto, preflight
from cs336_systems.training.auto import resolve

from .helpers import make_config, tiny_trainer

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FUSED: dict[str, Any] = dict(optimizer=dict(implementation="fused"))


@pytest.fixture(autouse=True)
def known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "device_peak_flops", lambda device, precision: 1e12)


def test_a_cpu_does_not_record_and_does_not_compile_a_short_run(tmp_path: Path) -> None:
    with tiny_trainer(make_config(tmp_path)) as trainer:
        assert (trainer.config.train.compile, trainer.config.train.cuda_graph) == (False, False)
        assert trainer._recorded is None


@pytest.mark.parametrize("device, speed", [(GPU, auto.USUAL_MFU * 1e12), (CPU, auto.CPU_THREAD_FLOPS)], ids=str)
@pytest.mark.usefixtures("one_thread")
def test_what_takes_long_is_compiled_where_pytorch_can(
    device: torch.device, speed: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flops_a_step = auto.training_flops(make_config(tmp_path).model.shape, 4, 16)
    enough = auto.COMPILATION_PAYS_AFTER_S[device.type] * speed / flops_a_step
    for can in (True, False):
        monkeypatch.setattr(auto, "can_compile", lambda device, can=can: can)
        for steps, expected in ((int(0.99 * enough), False), (int(1.01 * enough), can)):
            assert resolve(make_config(tmp_path, train=dict(max_steps=steps)), device).train.compile is expected


def test_without_a_compiler_a_cpu_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(function: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nin many lines")

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level(logging.INFO):
        assert not auto.can_compile(CPU)
    assert caplog.messages == ["blocks are not compiled, because PyTorch cannot: No working C++ compiler found"]


@pytest.mark.parametrize("how, value", [(dict(compile=True), "true"), (dict(compile_memory_budget=0.5), "'auto'")])
def test_compilation_that_cannot_be_is_refused_first(
    how: dict[str, Any], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "why_not_compiled", lambda device: "No working C++ compiler found")
    message = f"^train.compile is {value}: it must be false, with .*: No working C.. compiler found$"
    with pytest.raises(ValueError, match=message):
        preflight.check_config(make_config(Path("unused"), train=how), CPU)


def test_a_share_of_activations_is_kept_only_by_the_compiler(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(compile_memory_budget=0.5))
    assert resolve(config, CPU).train.compile is True


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
        assert resolve(make_config(tmp_path, **FUSED, **groups), GPU).train.cuda_graph is (named is None)
    assert caplog.messages == ([] if named is None else [caplog.messages[0]])
    assert named is None or named in caplog.messages[0]


@pytest.mark.parametrize("nccl", [True, False])
def test_transfers_of_gloo_are_not_recorded(
    nccl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    backends = "cpu:gloo,cuda:nccl" if nccl else "cpu:gloo,cuda:gloo"  # as PyTorch says them
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    with caplog.at_level(logging.INFO):
        assert resolve(make_config(tmp_path, parallel=dict(devices=2), **FUSED), GPU).train.cuda_graph is nccl
    reason = "the process group has no NCCL, and gloo waits for the GPU"
    assert caplog.messages == ([] if nccl else [f"the step is not recorded as a CUDA graph: {reason}"])


def test_a_recording_without_the_update_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve(make_config(tmp_path), GPU).train.cuda_graph is True
    assert caplog.messages == [
        "the update is not recorded in the CUDA graph: optimizer.implementation is own, not fused"
    ]
