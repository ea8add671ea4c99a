"""Errors are printed once for all ranks; transfers that hang and ranks that stand still end the process."""

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

from cs336_systems.parallel import comm, failure, heartbeat
from cs336_systems.parallel.heartbeat import Heartbeats
from cs336_systems.training.graph import RecordedStep
from tests.distributed import wait_until

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


def cause(message: str) -> Exception:
    return ValueError(message)


def waited(rank: int) -> Exception:
    """The error of a rank that waited for one that has failed."""
    return failure.CollectiveError(f"rank {rank}: all-reduce failed")


@pytest.mark.parametrize(
    "errors, printed",
    [
        ([(rank, 0, cause("train.lr is -1")) for rank in (2, 0, 3, 1)], ["rank 2: train.lr is -1"]),
        (
            [(rank, 0, cause(f"cuda:{rank} has 1 GiB")) for rank in range(3)],
            [f"rank {rank}: cuda:{rank} has 1 GiB" for rank in range(3)],
        ),
        ([(1, 0, cause("a fault")), (0, 0, waited(0)), (2, 0, waited(2))], ["rank 1: a fault"]),
        (
            [(2, 0, waited(2)), (0, 0, waited(0)), (1, 0, cause("a late fault"))],
            ["rank 2: all-reduce failed", "rank 1: a late fault"],
        ),
        ([(1, 0, cause("the disk is full")), (1, 1, cause("the disk is full"))], ["rank 1: the disk is full"] * 2),
    ],
    ids=["the same error", "errors of their own", "consequences", "consequences alone", "after a restart"],
)
def test_ranks_print_each_error_once(
    errors: list[tuple[int, int, Exception]],
    printed: list[str],
    start: Start,
    store: dist.TCPStore,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, restarts, error in errors:
        start(store, rank, restarts)
        failure.leave_failure(error)
    assert capsys.readouterr().err.splitlines() == printed


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


def test_every_rank_prints_an_error_if_the_agents_are_gone(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(store, 0)
    del store
    monkeypatch.setattr(failure, "agents_store", gone)
    for _ in range(2):
        failure.leave_failure(cause("no store"))
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
    failure.leave_failure(cause("alone"))
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


def first_of(told: list[str]) -> str:
    return wait_until(lambda: told, timeout_s=20)[0]


MESSAGE = f"rank 0: replay at step 7 was not done after {LIMIT_S} s"


@pytest.mark.parametrize("while_it_is_queued", [False, True])
def test_work_that_never_ends_is_reported(told: list[str], while_it_is_queued: bool) -> None:
    with comm.watched("replay"):
        if while_it_is_queued:
            first_of(told)
    assert first_of(told).startswith(MESSAGE)


def test_a_transfer_that_hangs_when_it_is_asked_is_reported(told: list[str]) -> None:
    class Stuck:
        name, started, end = "replay", time.monotonic(), threading.Event()

        def done(self) -> bool:
            return self.end.wait()

    assert comm._watchdog is not None
    comm._watchdog.watch(Stuck())
    assert first_of(told).startswith(MESSAGE)
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
    assert "the next one at step 7" in first_of(told)
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
            assert "replay of the recorded step at step 7" in first_of(told)

    step: Any = RecordedStep(lambda inputs, targets: inputs, lambda: None)
    step._graph, step._inputs, step._targets, step._output = Graph(), torch.zeros(1), torch.zeros(1), torch.ones(2)
    assert torch.equal(step(torch.ones(1), torch.ones(1)), torch.ones(2))


def test_one_process_alone_waits_for_nobody(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "world_size", lambda: 1)
    with comm.watched("replay"):
        pass
    time.sleep(3 * LIMIT_S)  # as above
    assert told == []


# Ranks that stand still while another one waits without a limit of its own

STILL_S = 0.8


@pytest.fixture
def ranks(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeats]]:
    """Three ranks in this process, on one store."""
    monkeypatch.setattr(Heartbeats, "LEAST_S", STILL_S)
    made = [Heartbeats(store, rank, 3, STILL_S) for rank in range(3)]
    yield made
    for one in made:
        one.stop()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The message with which a rank would have ended its process."""
    messages: list[str] = []
    monkeypatch.setattr(heartbeat, "fail", messages.append)
    monkeypatch.setattr(failure, "_step", None)  # another test may have trained in this process
    return messages


def test_a_rank_that_stands_still_ends_the_wait_for_it(ranks: list[Heartbeats], ended: list[str]) -> None:
    with ranks[0].awaiting("saving"):
        time.sleep(2 * STILL_S)
        assert ended == []
        ranks[2].stop()
        begun = time.monotonic()
        assert first_of(ended).startswith(f"rank 0: saving: rank 2 stood still for {STILL_S} s: ")
    assert time.monotonic() - begun > STILL_S / 2
    assert len(ended) == 1


def test_a_limit_for_steps_may_be_shorter_than_a_file_takes_to_be_serialized(
    store: dist.TCPStore, ended: list[str]
) -> None:
    ranks = [Heartbeats(store, rank, 2, STILL_S) for rank in range(2)]
    ranks[1].stop()
    with ranks[0].awaiting("saving"):
        time.sleep(2 * STILL_S)
    ranks[0].stop()
    assert ended == []


def test_who_waits_for_nobody_does_not_mind_who_has_ended(ranks: list[Heartbeats], ended: list[str]) -> None:
    with ranks[0].awaiting("saving"):
        time.sleep(STILL_S / 4)
    ranks[2].stop()
    time.sleep(2 * STILL_S)
    assert ended == []


def test_when_all_stand_still_together_nobody_is_blamed(ranks: list[Heartbeats], ended: list[str]) -> None:
    with ranks[0].awaiting("saving"), ranks[1].awaiting("saving"):
        for _ in range(3):
            time.sleep(STILL_S / 2)
            ctypes.PyDLL(None).usleep(int(1.5 * STILL_S * 1e6))  # which lets no thread run
        time.sleep(STILL_S)
    assert ended == []


def test_without_its_store_a_rank_goes_on(ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeats, "LEAST_S", STILL_S)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", store.port, is_master=False)
    one = Heartbeats(client, 0, 2, STILL_S)
    with one.awaiting("saving"):
        del store
        time.sleep(2 * STILL_S)
    assert ended == []
