"""Errors are printed once for all ranks, and transfers that hang end the process."""

import ctypes
import json
import multiprocessing
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cs336_systems.parallel import comm, failure
from cs336_systems.training.graph import RecordedStep

Start = Callable[..., None]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Be a rank that torchrun has started, whose agents keep this store."""

    def be(store: dist.TCPStore, rank: int, restarts: int = 0) -> None:
        environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "localhost"}
        environ |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        for name, value in (environ | {"TORCHELASTIC_RESTART_COUNT": restarts}).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)

    return be


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def say(message: str) -> None:
    failure.leave_failure(ValueError(message))


def test_the_first_rank_prints_an_error_that_all_ranks_find(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (2, 0, 3, 1):
        start(store, rank)
        say("train.lr is -1")
    assert capsys.readouterr().err == "rank 2: train.lr is -1\n"


def test_each_rank_prints_an_error_of_its_own(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        start(store, rank)
        say(f"cuda:{rank} has 1 GiB")
    assert capsys.readouterr().err == "".join(f"rank {rank}: cuda:{rank} has 1 GiB\n" for rank in range(3))


def test_consequences_of_another_ranks_failure_are_printed_only_if_nothing_else_is(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits(rank: int, restarts: int) -> None:
        start(store, rank, restarts)
        failure.leave_failure(failure.CollectiveError(f"rank {rank}: all-reduce at step 7 failed"))

    start(store, 1)
    say("the dog ate my gradients")
    waits(0, 0)
    waits(2, 0)
    assert capsys.readouterr().err == "rank 1: the dog ate my gradients\n"
    waits(2, 1)  # as where a rank was killed
    waits(0, 1)
    start(store, 1, 1)
    say("what comes late is said too")
    told = "rank 2: all-reduce at step 7 failed\nrank 1: what comes late is said too\n"
    assert capsys.readouterr().err == told


def test_an_error_is_left_once_and_whole(
    start: Start,
    store: dist.TCPStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    start(store, 1)
    monkeypatch.setattr(failure, "_step", None)  # another test may have trained in this process
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = RuntimeError("a fault")
    for _ in range(2):
        failure.leave_failure(error)
    assert capsys.readouterr().err == "rank 1: a fault\n"
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "a fault"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_an_error_is_printed_again_after_a_restart(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for restarts in range(2):
        start(store, 1, restarts)
        say("the disk is full")
    assert capsys.readouterr().err == "rank 1: the disk is full\n" * 2


def test_every_rank_prints_an_error_if_the_agents_are_gone(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(store, 0)
    del store
    monkeypatch.setattr(failure, "agents_store", gone)
    say("no store")
    say("no store")
    assert capsys.readouterr().err == "rank 0: no store\n" * 2


def gone(timeout_s: float) -> dist.Store:
    raise dist.DistNetworkError("connection refused")


def test_another_rank_prints_the_error_if_the_first_one_is_ended_before(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*values: object, **_: object) -> None:
        raise KeyboardInterrupt

    start(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.print", ended)
        with pytest.raises(KeyboardInterrupt):
            failure._say_once("train.lr is -1")
    start(store, 0)
    begun = time.monotonic()
    failure._say_once("train.lr is -1", patience_s=0.5)
    assert time.monotonic() - begun >= 0.5
    assert capsys.readouterr().err == "rank 0: train.lr is -1\n"


def test_without_agents_an_error_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", failure.OWN_LAUNCH):
        monkeypatch.delenv(name, raising=False)
    say("alone")
    assert capsys.readouterr().err == "rank 0: alone\n"


# Transfers that hang

LIMIT_S = 0.2


class Event:
    """In the place of a CUDA event: it has passed when the test says so, and before it is recorded, as CUDA has it."""

    passed, recorded = False, False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return Event.passed or not self.recorded


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Messages with which a watchdog of LIMIT_S would have ended this process, one of two ranks, at step 7."""
    messages: list[str] = []
    monkeypatch.setattr(failure, "fail", messages.append)
    monkeypatch.setattr(failure, "_step", 7)
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "passed", False)
    monkeypatch.setattr(comm, "_spare_events", [])
    watchdog = failure.Watchdog(LIMIT_S, torch.device("cpu"))
    monkeypatch.setattr(comm, "_watchdog", watchdog)
    yield messages
    watchdog.stop()


def wait_for(told: list[str]) -> str:
    deadline = time.monotonic() + 20
    while not told:
        assert time.monotonic() < deadline, "the watchdog says nothing"
        time.sleep(0.01)
    return told[0]


MESSAGE = f"rank 0: replay at step 7 was not done after {LIMIT_S} s: another rank is gone or hangs"


def test_queued_work_that_never_ends_is_reported(told: list[str]) -> None:
    with comm.watched("replay"):
        pass
    assert wait_for(told) == MESSAGE


def test_work_that_hangs_while_it_is_queued_is_reported(told: list[str]) -> None:
    with comm.watched("replay"):
        assert wait_for(told) == MESSAGE


def test_a_transfer_that_hangs_when_it_is_asked_is_reported(told: list[str]) -> None:
    class Stuck:
        name, started, end = "replay", time.monotonic(), threading.Event()

        def done(self) -> bool:
            return self.end.wait()

    assert comm._watchdog is not None
    comm._watchdog.watch(Stuck())
    assert wait_for(told) == MESSAGE
    Stuck.end.set()


def test_transfers_that_end_while_python_stands_still_are_not_reported(told: list[str]) -> None:
    class Done:
        name, started = "replay", time.monotonic() - 1000  # long ago for the clock

        def done(self) -> bool:
            return True

    assert comm._watchdog is not None
    for _ in range(10):
        comm._watchdog.watch(Done())
        ctypes.PyDLL(None).usleep(100_000)  # which lets no thread run
    time.sleep(3 * LIMIT_S)  # as below
    assert told == []


def stand_still() -> None:
    """Have a transfer under way, and then keep all threads from running Python."""
    failure.Watchdog.STUCK_S = 0.1
    watchdog = failure.Watchdog(2.0, torch.device("cpu"))
    watchdog.watch(comm._Queued("replay"))
    time.sleep(1.2)  # the watchdog has had its turn
    ctypes.PyDLL(None).sleep(60)


def test_a_process_whose_python_stands_still_ends_with_its_stack(capfd: pytest.CaptureFixture[str]) -> None:
    process = multiprocessing.get_context("fork").Process(target=stand_still)
    process.start()
    process.join(timeout=20)
    assert process.exitcode == 1
    assert re.search(r"Timeout .*in stand_still", capfd.readouterr().err, re.DOTALL)


def test_finished_work_is_forgotten(told: list[str]) -> None:
    with comm.watched("replay"):
        pass
    Event.passed = True
    time.sleep(3 * LIMIT_S)  # longer than the limit
    assert told == []
    (event,) = comm._spare_events  # not let go of
    Event.passed = False
    with comm.watched("the next one"):
        pass
    assert "the next one at step 7" in wait_for(told)
    assert isinstance(oldest := comm._watchdog._under_way[0], comm._Queued)
    assert oldest.passed is event


def test_work_that_fails_while_it_is_queued_is_not_reported_as_hanging(told: list[str]) -> None:
    def fail() -> None:
        with comm.watched("replay"):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    time.sleep(3 * LIMIT_S)  # as above
    assert told == []


def test_the_replay_of_a_recorded_step_is_watched(told: list[str]) -> None:
    class Graph:
        def replay(self) -> None:
            assert "replay of the recorded step at step 7" in wait_for(told)

    step: Any = RecordedStep(lambda inputs, targets: inputs, lambda: None)
    step._graph, step._inputs, step._targets, step._output = Graph(), torch.zeros(1), torch.zeros(1), torch.ones(2)
    assert torch.equal(step(torch.ones(1), torch.ones(1)), torch.ones(2))


def test_one_process_alone_waits_for_nobody(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "world_size", lambda: 1)
    with comm.watched("replay"):
        pass
    time.sleep(3 * LIMIT_S)  # as above
    assert told == []
