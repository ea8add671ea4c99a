"""Ranks of one start find each other in a store that earlier starts have used."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cs336_systems.parallel import comm
from cs336_systems.parallel.rendezvous import fresh_store
from tests.distributed import wait_until

TIMEOUT_S = 30.0


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def client(store: dist.TCPStore) -> dist.Store:
    """A connection of its own, as a process has: who waits on one keeps others off it."""
    return dist.TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)


def question(store: dist.Store, rank: int, earlier: bytes | None) -> bytes | None:
    """The question of a rank, once there is another than the earlier one."""
    key = f"question of rank {rank}"
    value = store.get(key) if store.check([key]) else None
    return None if value == earlier else value


def test_every_start_has_a_part_of_its_own_whoever_comes_first(store: dist.TCPStore) -> None:
    asked: dict[int, bytes | None] = {1: None, 2: None}
    for order in permutations(range(3)):  # each is a start; the store keeps the keys of earlier ones
        with ThreadPoolExecutor() as pool:
            started: dict[int, Future[dist.Store]] = {}
            for rank in order:
                started[rank] = pool.submit(fresh_store, client(store), rank, 3, TIMEOUT_S)
                if rank != 0:  # it has come before the next one starts
                    asked[rank] = wait_until(partial(question, store, rank, asked[rank]), timeout_s=TIMEOUT_S)
            parts = {rank: future.result(TIMEOUT_S) for rank, future in started.items()}
        for rank, part in parts.items():
            part.set(f"from {rank}", str(rank))
        for part in parts.values():
            assert [part.get(f"from {rank}") for rank in range(3)] == [b"0", b"1", b"2"]
        assert not any(parts[0].check([f"of start {other}"]) for other in permutations(range(3)))
        parts[1].set(f"of start {order}", "")


def test_a_missing_rank_is_named(store: dist.TCPStore) -> None:
    with pytest.raises(RuntimeError, match="rank 1, 2"):
        fresh_store(store, 0, 3, timeout_s=0.05)


def test_one_without_a_first_rank_does_not_wait_for_ever(store: dist.TCPStore) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        fresh_store(store, 1, 2, timeout_s=0.05)


def test_one_rank_alone_meets_at_once(store: dist.TCPStore) -> None:
    fresh_store(store, 0, 1, timeout_s=0).set("a", "b")
    assert not store.check(["a"])


def test_nccls_thread_blocks_are_limited_where_the_environment_has_no_other_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NCCL_MAX_CTAS", "4")
    with pytest.raises(ValueError, match=r"^nccl_max_ctas is 8: NCCL_MAX_CTAS is '4' in the environment"):
        comm.process_group(torch.device("cpu"), nccl_max_ctas=8).__enter__()
    monkeypatch.delenv("NCCL_MAX_CTAS")
    where = dict(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with comm.process_group(torch.device("cpu"), nccl_max_ctas=8, **where):
        assert os.environ["NCCL_MAX_CTAS"] == "8"


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_environment_without_a_rendezvous_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(each, value)
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"environment variable {name} expected, but not set"):
        comm.process_group(torch.device("cpu")).__enter__()


def test_a_port_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(ValueError, match=r"^MASTER_PORT is 'http' in the environment: it must be a whole number"):
        comm.process_group(torch.device("cpu")).__enter__()
