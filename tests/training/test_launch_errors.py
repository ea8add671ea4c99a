"""The launcher by itself: its refusals, the signals that it gets, and the error it makes of the ranks' reports."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing import SignalException

from cs336_systems.machine.console import Ended
from cs336_systems.parallel.failure import OWN_LAUNCH, CollectiveError
from cs336_systems.training import launch, train
from cs336_systems.training.launch import _failure
from cs336_systems.training.signals import StopRequest
from tests.training.helpers import make_config


def test_a_cause_is_told_before_its_consequences(tmp_path: Path) -> None:
    reports = [("RuntimeError", "rank 1: out of memory", 20), ("CollectiveError", "rank 0: another rank is gone", 10)]
    for kind, message, timestamp in reports:
        report = {"message": message, "kind": kind, "extraInfo": {"timestamp": str(timestamp)}}
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "error.json").write_text(json.dumps({"message": report}))
    failures: Any = {rank: SimpleNamespace(exitcode=1) for rank in (0, 1)}
    assert str(_failure(failures, tmp_path)) == "rank 1: out of memory"
    # The launcher's signal may come before rank 0 has ended.
    failures[0] = SimpleNamespace(exitcode=-signal.SIGTERM, signal_name=lambda: "SIGTERM")
    assert str(_failure(failures, tmp_path)) == "rank 1: out of memory"


@pytest.mark.parametrize(
    "message, waited",
    [
        ("rank 0: x: another rank is gone or hangs", True),
        ("rank 0: x failed: Timed out after 5 s", True),
        ("rank 0: x: Application timeout", True),
        ("rank 0: x failed", False),
    ],
)
def test_the_rank_that_a_signal_ended_comes_first_unless_another_rank_waited_for_it(
    message: str, waited: bool, tmp_path: Path
) -> None:
    ended_rank = "rank 1 was ended by SIGKILL"
    told = f"{message}; {ended_rank}" if waited else f"{ended_rank}; {message}"
    report = {"message": message, "kind": "CollectiveError", "extraInfo": {"timestamp": "1"}}
    (tmp_path / "error.json").write_text(json.dumps({"message": report}))
    ended, told_to = (SimpleNamespace(exitcode=-n, signal_name=lambda n=n: signal.Signals(n).name) for n in (9, 15))
    failures: Any = {0: SimpleNamespace(exitcode=1), 1: ended}
    assert str(_failure(failures, tmp_path)) == told
    if not waited:  # the launcher's signal to rank 0 says nothing
        assert str(_failure({0: told_to, 1: ended}, tmp_path)) == told  # type: ignore[dict-item]


def test_a_report_that_was_not_written_to_its_end_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("")
    failures: Any = {0: SimpleNamespace(exitcode=-9, signal_name=lambda: "SIGKILL")}
    assert str(_failure(failures, tmp_path)) == "rank 0 was ended by SIGKILL"


def test_an_error_in_the_loop_is_reported_before_a_signal_can_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, message = tmp_path / "error.json", "rank 0: all-reduce at step 7 failed"
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(report)}
    for name, value in {**environ, OWN_LAUNCH: "1"}.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequest()

    def fails() -> None:
        with stop:
            os.kill(os.getpid(), signal.SIGTERM)
            raise CollectiveError(message)

    with pytest.raises(CollectiveError):
        fails()
    assert stop.signal == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) == before
    assert json.loads(report.read_text())["message"]["message"].startswith(message)


def raising(error: Exception) -> Callable[..., None]:
    def raises(*_: Any) -> None:
        raise error

    return raises


def test_a_signal_before_the_processes_can_save_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def launched(by: Callable[..., None]) -> None:
        monkeypatch.setattr("cs336_systems.training.launch.elastic_launch", lambda *_: by)
        train(make_config(tmp_path, parallel=dict(devices=2)))

    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(Ended, match=f"ended by {number.name}") as ended:
            launched(raising(SignalException("", number)))
        assert ended.value.exit_code == 128 + number
    with pytest.raises(BaseException) as interrupted:  # noqa: PT011 - a KeyboardInterrupt would end the test session
        launched(pressed)
    assert interrupted.type is KeyboardInterrupt


def test_fewer_gpus_than_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = make_config(tmp_path, parallel=dict(devices=4), train=dict(device="cuda"))
    with pytest.raises(ValueError, match=r"parallel.devices is 4: each process takes .* PyTorch sees 2"):
        launch.launch(config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"^LOCAL_WORLD_SIZE \(torchrun's --nproc-per-node\) is 3: each .* sees 2"):
        launch.use_device_of_rank("cuda")


@pytest.mark.parametrize(
    "groups, message",
    [
        (dict(parallel=dict(devices=3)), "train.batch_size is 4: it must be divisible by .* 3 x 1"),
        (dict(parallel=dict(devices=2), train=dict(gradient_accumulation_steps=4)), "divisible by .* 2 x 4"),
        (dict(parallel=dict(bucket_size_mb=0.0)), "parallel.bucket_size_mb is 0.0"),
        (dict(parallel=dict(nccl_max_ctas=0)), "parallel.nccl_max_ctas is 0"),
        (dict(parallel=dict(devices=2, strategy="none")), "parallel.strategy is 'none'"),
        (dict(parallel=dict(strategy="fsdp", shard_optimizer=True)), "parallel.shard_optimizer is true"),
        (
            dict(parallel=dict(reshard_after_forward=False)),
            "reshard_after_forward is false: it must be true with .*'auto', which decides it",
        ),
        (dict(parallel=dict(devices=2), train=dict(device="cuda:1")), "train.device is 'cuda:1'"),
        (dict(parallel=dict(devices=2, strategy="torch_fsdp"), train=dict(cuda_graph=True)), "is .torch_fsdp."),
        (dict(parallel=dict(strategy="bogus")), "parallel.strategy is 'bogus': it must be one of auto, none"),
    ],
    ids=str,
)
def test_impossible_parallel_settings_are_refused(groups: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **groups)
