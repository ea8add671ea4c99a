"""A checkpoint saved in the background is the same as one saved in the foreground, and its errors are raised."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cs336_systems.parallel import comm
from cs336_systems.training import checkpoint
from cs336_systems.training.async_saver import AsyncSaver
from cs336_systems.training.checkpoint import CheckpointError, save_checkpoint
from cs336_systems.training.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_name,
    find_checkpoints,
    newest_whole_checkpoint,
    verify_checkpoint,
)
from cs336_systems.training.tensor_files import Rows, read_tensors

from ..distributed import run_ranks
from .helpers import (
    assert_same_tensors,
    error_of,
    largest_file,
    raw_bytes,
    read_independently,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")

REST: dict[str, Any] = dict(
    sequences=4, identity={"a": 1}, trainer={"skipped_steps": 0, "scaler": {}}, config={"b": {}}, versions={}
)


@contextlib.contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Writing waits until the yielded function is called."""
    may_write = threading.Event()
    write = checkpoint.write_tensors

    def waiting(*args: Any) -> Any:
        assert may_write.wait(60)
        return write(*args)

    monkeypatch.setattr(checkpoint, "write_tensors", waiting)
    try:
        yield may_write.set
    finally:
        may_write.set()


def content(path: Path) -> dict[str, Any]:
    """All of a checkpoint but the hashes: safetensors writes the entries of a file's metadata in any order."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest.pop("checksum")
    for file in manifest["files"].values():
        file.pop("sha256")
    found: dict[str, Any] = {MANIFEST: manifest}
    for file in path.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as reader:
            tensors = {name: raw_bytes(reader.get_tensor(name)) for name in reader.keys()}  # noqa: SIM118
            found[file.name] = reader.metadata(), tensors, file.stat().st_size
    return found


def test_it_equals_a_save_in_the_foreground(tmp_path: Path) -> None:
    with AsyncSaver() as saver:
        path = saver.save(tmp_path / "async", tensors_of(3), Manifest(step=3, **REST))
    expected = save_checkpoint(tmp_path / "sync", tensors_of(3), Manifest(step=3, **REST))
    assert path.name == expected.name
    assert content(path) == content(expected)


def test_changes_after_the_call_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = tensors_of(3)
    rest = {**REST, "trainer": {"skipped_steps": 0, "scaler": {"scale": 2.0}}}
    with AsyncSaver() as saver, held_back(monkeypatch) as go_on:
        path = saver.save(tmp_path, tensors, Manifest(step=3, **rest))
        for tensor in tensors.values():
            tensor.fill_(1)
        rest["trainer"]["scaler"]["scale"] = 4.0
        assert not path.exists()
        go_on()
        saver.wait()
        assert_same_tensors(read_independently(path), tensors_of(3))
        assert verify_checkpoint(path).trainer["scaler"] == {"scale": 2.0}


def test_training_goes_on_meanwhile_and_the_next_save_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncSaver() as saver:
        with held_back(monkeypatch) as go_on:
            saver.save(tmp_path, tensors_of(1), Manifest(step=1, **REST))
            assert find_checkpoints(tmp_path) == []  # and yet we are here
            timer = threading.Timer(0.2, go_on)
            timer.start()
            saver.save(tmp_path, tensors_of(2), Manifest(step=2, **REST))
            assert tmp_path / checkpoint_name(1) in find_checkpoints(tmp_path)
            timer.join()
        saver.wait()
    for step in (1, 2):
        path = tmp_path / checkpoint_name(step)
        assert verify_checkpoint(path).step == step
        assert_same_tensors(read_independently(path), tensors_of(step))


def test_older_checkpoints_are_pruned_after_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AsyncSaver() as saver:
        for step in (1, 2, 3):
            saver.save(tmp_path, tensors_of(step, 10), Manifest(step=step, **REST), keep_last=2)
        saver.wait()
        with held_back(monkeypatch):
            saver.save(tmp_path, tensors_of(4, 10), Manifest(step=4, **REST), keep_last=2)
            kept = [path.name for path in find_checkpoints(tmp_path)]
            assert kept == [checkpoint_name(3), checkpoint_name(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(3), checkpoint_name(4)]


@pytest.mark.parametrize("next_call", ["save", "wait", "close"])
def test_an_error_is_raised_by_the_next_call_once(tmp_path: Path, next_call: str) -> None:
    saver = AsyncSaver()
    saver.save(tmp_path, tensors_of(1), Manifest(step=1, **REST))
    saver.wait()
    with largest_file(1000):
        saver.save(tmp_path, tensors_of(2), Manifest(step=2, **REST))
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: saver.save(tmp_path, tensors_of(3), Manifest(step=3, **REST)),
            "wait": saver.wait,
            "close": saver.close,
        }
        with pytest.raises(CheckpointError, match=rf"{checkpoint_name(2)} could not be written: File too large"):
            calls[next_call]()
    saver.wait()
    saver.save(tmp_path, tensors_of(4), Manifest(step=4, **REST))
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(1), checkpoint_name(4)]


def test_an_error_does_not_hide_the_one_that_ended_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        with AsyncSaver() as saver:
            saver.save(tmp_path / "file" / "below", tensors_of(1), Manifest(step=1, **REST))
            raise KeyError("the loss")

    (tmp_path / "file").write_text("")
    with pytest.raises(KeyError, match="the loss"):
        run()
    assert "could not be written: Not a directory" in caplog.text


# Several ranks


def shares(step: int) -> dict[str, Tensor | Rows]:
    """A tensor that all ranks have, one that only this rank has, and rows."""
    whole = torch.arange(10.0).view(5, 2) + step
    first = min(3 * comm.rank(), 5)
    return {
        "all": torch.full((100,), float(step)),
        f"own.{comm.rank()}": torch.full((9,), float(step)),
        "rows": Rows(whole[first : first + 3], whole.shape, first),
    }


def save_and_train(folder: str) -> None:
    """Saves in the background while the main thread sends on its own."""
    saver = AsyncSaver()
    for step in range(1, 6):
        tensors = shares(step)
        saver.save(Path(folder) / "async", tensors, Manifest(step=step, **REST), keep_last=3)
        for number in range(20):
            assert comm.gather_objects(number, "training") == [number] * comm.world_size()
            tensor = torch.full((1000,), float(comm.rank()))
            comm.mean([tensor], "gradients")
            assert bool((tensor == (comm.world_size() - 1) / 2).all())
        for part in tensors.values():
            (part.local if isinstance(part, Rows) else part).fill_(-1)
    saver.close()
    save_checkpoint(Path(folder) / "sync", shares(5), Manifest(step=5, **REST))


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_ranks_save_in_the_background_while_they_train(tmp_path: Path, world_size: int) -> None:
    run_ranks(save_and_train, world_size, str(tmp_path))
    names = [checkpoint_name(step) for step in (5, 4, 3)]
    assert [path.name for path in find_checkpoints(tmp_path / "async")] == names
    assert content(tmp_path / "async" / names[0]) == content(tmp_path / "sync" / names[0])
    for path in find_checkpoints(tmp_path / "async"):
        step = verify_checkpoint(path).step
        into = {"rows": torch.zeros(5, 2), "all": torch.zeros(100)}
        read_tensors(path, into)
        assert torch.equal(into["rows"], torch.arange(10.0).view(5, 2) + step)
        assert torch.equal(into["all"], torch.full((100,), float(step)))


def fail_in_the_background(folder: str) -> tuple[str, str]:
    with AsyncSaver() as saver:
        saver.save(Path(folder), shares(1), Manifest(step=1, **REST))
        saver.wait()
        # A limit of the whole process, so it has to hold until the thread is done.
        with largest_file(100 if comm.rank() == 1 else 1 << 40):
            saver.save(Path(folder), shares(2), Manifest(step=2, **REST))
            error = error_of(saver.wait)
    return type(error).__name__, str(error)


def test_an_error_of_one_rank_in_the_background_is_raised_on_all(tmp_path: Path) -> None:
    for kind, message in run_ranks(fail_in_the_background, 3, str(tmp_path), timeout_s=30):
        assert kind == "CheckpointError"
        assert "rank 1: File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)]


# kill -9


def save_without_end(folder: str, first_step: int, elements: int, events: Connection) -> None:
    torch.set_num_threads(1)
    saver = AsyncSaver()
    for step in count(first_step):
        events.send(step)
        saver.save(Path(folder), tensors_of(step, elements), Manifest(step=step, **REST), keep_last=2)


def test_kill_9_at_any_moment_leaves_the_newest_finished_checkpoint_whole(tmp_path: Path) -> None:
    kills, elements = 15, 200_000
    rng = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed.checkpoint", "cs336_systems.training"])
    newest, in_the_middle = 0, 0
    for _ in range(kills):
        receiving, sending = context.Pipe(duplex=False)
        child = context.Process(target=save_without_end, args=(str(tmp_path), newest + 1, elements, sending))
        child.start()
        sending.close()
        asked = 0
        for _ in range(rng.randrange(3, 6)):
            assert receiving.poll(60), "the saving process tells nothing"
            asked = receiving.recv()
        time.sleep(rng.uniform(0, 0.05))  # this is the random moment, not a wait for something
        os.kill(child.pid, signal.SIGKILL)  # type: ignore[arg-type]
        child.join(timeout=30)
        assert child.exitcode == -signal.SIGKILL
        receiving.close()
        in_the_middle += any(path.name.startswith(".saving-") for path in tmp_path.iterdir())
        for path in find_checkpoints(tmp_path):
            assert_same_tensors(read_independently(path), tensors_of(verify_checkpoint(path).step, elements))
        found = newest_whole_checkpoint(tmp_path)
        assert found is not None
        newest = found[1].step
        assert newest >= asked - 2, "the last finished save is gone"
    assert in_the_middle > kills // 4, "the kills did not hit the saves"


def copied_bytes(folder: str) -> tuple[int, int]:
    """Bytes that this rank holds in main memory to save a state that all ranks have, and the size of the state."""
    tensors = tensors_of(1)
    with AsyncSaver() as saver:
        saver.save(Path(folder), tensors, Manifest(step=1, **REST))
        held = sum(buffer.nbytes for buffer in saver._buffers.values())
    return held, sum(tensor.nbytes for tensor in tensors.values())


def test_the_ranks_hold_one_copy_of_the_state_together(tmp_path: Path) -> None:
    results = run_ranks(copied_bytes, 2, str(tmp_path))
    assert sum(held for held, _ in results) == results[0][1]
    assert_same_tensors(read_independently(tmp_path / "step_00000001"), tensors_of(1))
