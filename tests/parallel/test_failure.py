"""What is wrong is said, and said once, however the ranks that find it come to it."""

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from cs336_systems.parallel import failure

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


def test_the_first_rank_to_find_it_says_it_for_all(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (2, 0, 3, 1):
        start(store, rank)
        say("train.lr is -1")
    assert capsys.readouterr().err == "rank 2: train.lr is -1\n"


def test_what_each_rank_finds_alone_each_says(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(3):
        start(store, rank)
        say(f"cuda:{rank} has 1 GiB")
    assert capsys.readouterr().err == "".join(f"rank {rank}: cuda:{rank} has 1 GiB\n" for rank in range(3))


def test_after_a_restart_it_is_said_again(
    start: Start, store: dist.TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for restarts in range(2):
        start(store, 1, restarts)
        say("the disk is full")
    assert capsys.readouterr().err == "rank 1: the disk is full\n" * 2


def test_where_the_agents_are_gone_every_rank_says_it(
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


def test_where_the_first_rank_is_ended_before_it_speaks_another_one_does(
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


def test_without_agents_it_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", failure.OWN_LAUNCH):
        monkeypatch.delenv(name, raising=False)
    say("alone")
    assert capsys.readouterr().err == "rank 0: alone\n"
