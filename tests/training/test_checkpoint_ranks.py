"""Several ranks save or fail together: if one fails, all raise the error soon, and no torn checkpoint is left."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.parallel import comm
from cs336_systems.training import checkpoint, tensor_files
from cs336_systems.training.checkpoint import CheckpointError, save_checkpoint
from cs336_systems.training.manifest import Manifest, checkpoint_name, newest_whole_checkpoint, verify_checkpoint
from cs336_systems.training.together import on_every_rank, on_first_rank, reason

from ..distributed import run_ranks
from .helpers import DAMAGE, NO_SPACE, REST, FaultyFileSystem, error_of, largest_file, save_step, tensors_of

pytestmark = pytest.mark.usefixtures("one_thread")


def own_tensors(step: int, elements: int = 50_000) -> dict[str, Tensor]:
    """As tensors_of, with a tensor that only this rank has."""
    return tensors_of(step, 100) | {f"own.{comm.rank()}": torch.full((elements,), float(step))}


def save_own(folder: Path, step: int, elements: int = 50_000) -> Path:
    return save_checkpoint(folder, own_tensors(step, elements), Manifest(step=step, **REST))


def fail_on_disk(folder: str, rank: int) -> tuple[str, str, list[str]]:
    save_own(Path(folder), 1)
    limit: Any = partial(largest_file, 1000) if comm.rank() == rank else partial(largest_file, 1 << 40)
    with limit():
        error = error_of(lambda: save_own(Path(folder), 2))
    names = sorted(path.name for path in Path(folder).iterdir())
    comm.barrier("all have looked")
    save_own(Path(folder), 3)
    return type(error).__name__, str(error), names


@pytest.mark.parametrize("rank", [0, 2])
def test_a_full_disk_on_one_rank_is_a_checkpoint_error_on_all_and_leaves_nothing(tmp_path: Path, rank: int) -> None:
    for kind, message, names in run_ranks(fail_on_disk, 3, str(tmp_path), rank, timeout_s=30):
        assert kind == "CheckpointError"
        assert f"rank {rank}: File too large" in message
        assert str(tmp_path / checkpoint_name(2)) in message
        assert names == [checkpoint_name(1)]
    for step in (1, 3):
        verify_checkpoint(tmp_path / checkpoint_name(step))


def fail_at_each_call(folder: str, rank: int) -> list[str]:
    """Save with a fault at the n-th call of this rank, for each n. Returns the calls."""
    mine = comm.rank() == rank
    with FaultyFileSystem() as files:
        save_own(Path(folder) / "without", 1, 10)
    calls = comm.all_gather_objects(files.calls, "calls of the test")[rank]
    for n, call in enumerate(calls, start=1):
        where = Path(folder) / str(n)
        save_own(where, 1, 10)
        with FaultyFileSystem(n if mine else None, NO_SPACE if mine else None):
            error = error_of(lambda where=where: save_own(where, 2, 10))
        outcomes = comm.all_gather_objects(error and str(error), "errors of the test")
        assert len({outcome is None for outcome in outcomes}) == 1, f"{call}: {outcomes}"
        if error is not None:
            assert isinstance(error, CheckpointError)
            assert "No space left on device" in str(error), call
        verify_checkpoint(where / checkpoint_name(1))
        assert comm.rank() or not list(where.glob(".saving-*")), call
        save_own(where, 3, 10)
    return calls


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_any_call_of_any_rank_is_one_on_all_and_the_next_save_works(tmp_path: Path, rank: int) -> None:
    calls = run_ranks(fail_at_each_call, 2, str(tmp_path), rank)[0]
    assert any(call.startswith("fsync") for call in calls)
    for path in tmp_path.glob("*/step_*"):
        verify_checkpoint(path)


def fail_without_a_way_to_say_so(folder: str) -> str:
    class Unsendable(Exception):  # cannot be pickled: not a class of the module
        pass

    def write(*_: Any) -> Any:
        raise Unsendable("very local")

    if comm.rank() == 1:
        tensor_files.dcp.HuggingFaceStorageWriter.write_data = write  # type: ignore
    return str(error_of(lambda: save_own(Path(folder), 1)))


def test_an_exception_that_cannot_be_sent_is_told_in_words(tmp_path: Path) -> None:
    for message in run_ranks(fail_without_a_way_to_say_so, 2, str(tmp_path), timeout_s=30):
        assert "rank 1: Unsendable: very local" in message


def die_in(where: str) -> Callable[..., Any]:
    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return die


PLACES: dict[str, tuple[Any, str]] = {
    "writing": (tensor_files.dcp.HuggingFaceStorageWriter, "write_data"),
    "hashing": (checkpoint, "describe_files"),
    "manifest": (checkpoint.Manifest, "to_json"),
    "renaming": (Path, "rename"),
}


def save_and_die(folder: str, rank: int, place: str) -> None:
    """Kill one rank at a place of the save of step 2. The others write their error into a file."""
    save_own(Path(folder) / "checkpoints", 1)
    if comm.rank() == rank:
        setattr(*PLACES[place], die_in(place))
    comm.barrier("start of the test")
    began = time.monotonic()
    error = error_of(lambda: save_own(Path(folder) / "checkpoints", 2))
    seen = {"kind": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
    (Path(folder) / f"rank{comm.rank()}").write_text(json.dumps(seen))
    os._exit(1)  # as a run ends that could not save


KILLS = [
    (0, "writing"),
    (1, "writing"),
    (3, "writing"),
    (0, "hashing"),
    (2, "hashing"),
    (0, "manifest"),
    (0, "renaming"),
]


@pytest.mark.parametrize("rank, place", KILLS)
def test_a_rank_that_is_killed_in_a_save_is_a_checkpoint_error_on_the_others(
    tmp_path: Path, rank: int, place: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match="died"):
        run_ranks(save_and_die, 4, str(tmp_path), rank, place, timeout_s=30)
    for other in {0, 1, 2, 3} - {rank}:
        seen = json.loads((tmp_path / f"rank{other}").read_text())
        assert seen["kind"] == "CheckpointError", seen
        assert "another rank is gone" in seen["message"]
        assert seen["seconds"] < 20
    found = newest_whole_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found[1].step == 1
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == [checkpoint_name(1)]


# Work of one rank for all


def find_newest(folder: str) -> tuple[str, str | None]:
    path = Path(folder)
    message = str(error_of(lambda: on_first_rank(lambda: verify_checkpoint(path / checkpoint_name(2)))))
    found = on_first_rank(lambda: newest_whole_checkpoint(path))
    return message, found and found[0].name


def test_all_ranks_get_the_same_checkpoint_or_the_same_error(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    DAMAGE["a byte flipped"](save_step(tmp_path, 2))
    results = run_ranks(find_newest, 3, str(tmp_path))
    assert len(set(results)) == 1
    message, found = results[0]
    assert "is damaged: its SHA-256" in message
    assert found == checkpoint_name(1)


def raise_here_and_there() -> list[str]:
    def act(failing: tuple[int, ...]) -> int:
        if comm.rank() in failing:
            raise KeyError(f"rank {comm.rank()}")
        return comm.rank()

    messages = []
    for failing in [(1,), (2, 1), (0, 1, 2)]:
        error = error_of(lambda failing=failing: on_every_rank(lambda: act(failing), "test"))
        assert isinstance(error, KeyError)
        messages.append(str(error))
    assert on_every_rank(lambda: act(()), "test") == [0, 1, 2]
    return messages


def test_the_lowest_failing_rank_is_heard_on_all() -> None:
    for messages in run_ranks(raise_here_and_there, 3):
        assert messages == ["'rank 1'", "'rank 1'", "'rank 0'"]


@pytest.mark.parametrize(
    "cause, said",
    [
        (NO_SPACE, "No space left on device"),  # raised from it
        (None, "ValueError: in our own words"),  # raised from None: the error before is not the reason
    ],
)
def test_the_reason_is_in_the_words_of_the_system_error_behind_it(cause: BaseException | None, said: str) -> None:
    def failing() -> None:
        try:
            raise NO_SPACE
        except OSError:
            raise ValueError("in our own words") from cause

    assert reason(error_of(failing)) == said
