"""Whether another rank's process still runs is noticed in a wait that has no limit of its own, and only there."""

import ctypes
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from cs336_systems.parallel import heartbeat
from cs336_systems.parallel.heartbeat import Heartbeats

LIMIT_S = 0.8


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeats]]:
    """Three ranks in this process, on one store."""
    monkeypatch.setattr(Heartbeats, "LEAST_S", LIMIT_S)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    made = [Heartbeats(store, rank, 3, LIMIT_S) for rank in range(3)]
    yield made
    for one in made:
        one.stop()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The message with which a rank would have ended its process."""
    messages: list[str] = []
    monkeypatch.setattr(heartbeat, "fail", messages.append)
    return messages


def test_a_rank_that_stands_still_ends_the_wait_for_it(ranks: list[Heartbeats], told: list[str]) -> None:
    with ranks[0].awaiting("saving"):
        time.sleep(2 * LIMIT_S)
        assert told == []
        ranks[2].stop()
        begun = time.monotonic()
        while not told:
            assert time.monotonic() - begun < 20
            time.sleep(0.01)
    assert time.monotonic() - begun > LIMIT_S / 2
    assert told == [f"rank 0: saving: rank 2 stood still for {LIMIT_S} s: it is gone or hangs"]


def test_a_limit_for_steps_may_be_shorter_than_a_file_takes_to_be_serialized(told: list[str]) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [Heartbeats(store, rank, 2, LIMIT_S) for rank in range(2)]
    ranks[1].stop()
    with ranks[0].awaiting("saving"):
        time.sleep(2 * LIMIT_S)
    ranks[0].stop()
    assert told == []


def test_who_waits_for_nobody_does_not_mind_who_has_ended(ranks: list[Heartbeats], told: list[str]) -> None:
    with ranks[0].awaiting("saving"):
        time.sleep(LIMIT_S / 4)
    ranks[2].stop()
    time.sleep(2 * LIMIT_S)
    assert told == []


def test_when_all_stand_still_together_nobody_is_blamed(ranks: list[Heartbeats], told: list[str]) -> None:
    with ranks[0].awaiting("saving"), ranks[1].awaiting("saving"):
        for _ in range(3):
            time.sleep(LIMIT_S / 2)
            ctypes.PyDLL(None).usleep(int(1.5 * LIMIT_S * 1e6))  # which lets no thread run
        time.sleep(LIMIT_S)
    assert told == []


def test_without_its_store_a_rank_goes_on(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeats, "LEAST_S", LIMIT_S)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", store.port, is_master=False)
    one = Heartbeats(client, 0, 2, LIMIT_S)
    with one.awaiting("saving"):
        del store
        time.sleep(2 * LIMIT_S)
    assert told == []
