"""Whatever ends a save - an error, a full disk, kill -9 - the checkpoints that were there before stay whole."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cs336_systems.cli.main import main
from cs336_systems.parallel import comm
from cs336_systems.parallel.heartbeat import Heartbeats
from cs336_systems.training import checkpoint, train
from cs336_systems.training.checkpoint import CheckpointError, prune_checkpoints, save_checkpoint
from cs336_systems.training.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_name,
    find_checkpoints,
    newest_whole_checkpoint,
    verify_checkpoint,
)

from .helpers import (
    NO_SPACE,
    FaultyFileSystem,
    Killed,
    assert_same_tensors,
    checkpoint_names,
    checkpoint_path,
    error_of,
    largest_file,
    make_config,
    read_independently,
    run_train,
    save_step,
    save_without_end,
    small_disk,
    tensor_file,
    tensors_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_whole(path: Path) -> None:
    assert_same_tensors(read_independently(path), tensors_of(verify_checkpoint(path).step))


def assert_checkpoint_error(error: BaseException | None, path: Path, reason: str, when: str = "") -> None:
    assert isinstance(error, CheckpointError), f"{type(error).__name__} instead of a CheckpointError {when}"
    assert str(path) in str(error)
    assert reason in str(error)


def calls_of_a_save(folder: Path, *steps_before: int) -> list[str]:
    """The file system calls of a save of step 2, in order."""
    for step in steps_before:
        save_step(folder, step)
    with FaultyFileSystem() as files:
        save_step(folder, 2)
    return files.calls


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Order


def test_a_checkpoint_gets_its_name_only_when_all_of_it_is_on_the_disk(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path / "run", 1)
    tensors = tensor_file(tmp_path / "run" / checkpoint_name(2)).name
    (renamed,) = (i for i, call in enumerate(calls) if call == f"rename .saving-{checkpoint_name(2)}")
    flushed = [call.removeprefix("fsync ") for call in calls[:renamed] if call.startswith("fsync ")]
    assert sorted(flushed) == sorted([tensors, MANIFEST, f".saving-{checkpoint_name(2)}"])
    assert flushed[-2:] == [MANIFEST, f".saving-{checkpoint_name(2)}"]
    assert "fsync run" in calls[renamed:], "the renaming itself is not on the disk"


# Errors at each step


@pytest.mark.parametrize("saved_before", [(1,), (1, 2)], ids=["new step", "step again"])
def test_an_error_at_any_step_of_a_save_leaves_the_older_checkpoints_and_no_leftovers(
    tmp_path: Path, saved_before: tuple[int, ...]
) -> None:
    calls = calls_of_a_save(tmp_path / "without fault", *saved_before)
    assert len(calls) > 8
    for n, call in enumerate(calls, start=1):
        folder = tmp_path / str(n)
        for step in saved_before:
            save_step(folder, step)
        with FaultyFileSystem(n, NO_SPACE) as files:
            error = error_of(lambda folder=folder: save_step(folder, 2))
        assert len(files.calls) >= n
        if error is None:
            assert_whole(folder / checkpoint_name(2))  # an error while tidying up is no failure to save
        else:
            assert_checkpoint_error(error, folder / checkpoint_name(2), "No space left on device", call)
        for step in saved_before:
            assert (folder / checkpoint_name(step)).is_dir(), f"step {step} is lost after an error in: {call}"
            assert_whole(folder / checkpoint_name(step))
        assert not [name for name in names_in(folder) if name.startswith(".saving-")], call


def test_a_tensor_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    transposed = {"t": torch.arange(6.0).view(2, 3).t()}  # safetensors takes none that is not contiguous
    rest: dict[str, Any] = dict(sequences=0, identity={}, trainer={}, config={}, versions={})
    error = error_of(lambda: save_checkpoint(tmp_path, transposed, Manifest(step=2, **rest)))
    assert_checkpoint_error(error, tmp_path / checkpoint_name(2), "contiguous")
    assert names_in(tmp_path) == [checkpoint_name(1)]


# Kills at each step


@pytest.mark.parametrize("saved_before", [(1,), (1, 2)], ids=["new step", "step again"])
def test_a_kill_at_any_step_of_a_save_leaves_whole_checkpoints_and_the_next_save_works(
    tmp_path: Path, saved_before: tuple[int, ...]
) -> None:
    calls = calls_of_a_save(tmp_path / "without fault", *saved_before)
    for n, call in enumerate(calls, start=1):
        folder = tmp_path / str(n)
        for step in saved_before:
            save_step(folder, step)
        with FaultyFileSystem(n, Killed()):
            error_of(lambda folder=folder: save_step(folder, 2))
        for path in find_checkpoints(folder):
            assert_whole(path)
        found = newest_whole_checkpoint(folder)
        assert found is not None, call

        error = error_of(lambda folder=folder: save_step(folder, 2))
        assert error is None, f"after a kill in `{call}` the same step cannot be saved again: {error}"
        assert names_in(folder) == [checkpoint_name(1), checkpoint_name(2)], call
        assert_whole(folder / checkpoint_name(2))


def test_a_kill_at_any_step_of_pruning_leaves_no_torn_checkpoint(tmp_path: Path) -> None:
    def prepare(folder: Path) -> None:
        for step in (1, 2, 3, 4):
            save_step(folder, step, elements=10)

    prepare(tmp_path / "without fault")
    with FaultyFileSystem() as files:
        prune_checkpoints(tmp_path / "without fault", 2)
    for n, call in enumerate(files.calls, start=1):
        folder = tmp_path / str(n)
        prepare(folder)
        with FaultyFileSystem(n, Killed()):
            error_of(lambda folder=folder: prune_checkpoints(folder, 2))
        for path in find_checkpoints(folder):
            verify_checkpoint(path)
        assert names_in(folder)[-2:] == [checkpoint_name(3), checkpoint_name(4)], call
        prune_checkpoints(folder, 2)
        assert names_in(folder) == [checkpoint_name(3), checkpoint_name(4)], call


# kill -9


@contextlib.contextmanager
def saving_process(folder: Path, first_step: int, elements: int) -> Iterator[tuple[Any, Any]]:
    """A process that saves and prunes until it is killed, and the pipe on which it tells of it."""
    context = multiprocessing.get_context("forkserver")
    # Torch is imported once, in the server; every child starts as a copy of it.
    context.set_forkserver_preload(["pytest", "torch.distributed.checkpoint", "cs336_systems.training"])
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=save_without_end, args=(str(folder), first_step, elements, sending))
    child.start()
    sending.close()
    try:
        yield child, receiving
    finally:
        child.kill()
        child.join(timeout=30)
        receiving.close()


def test_kill_9_at_any_moment_of_a_save_leaves_the_newest_finished_checkpoint_whole(tmp_path: Path) -> None:
    kills, elements = 15, 200_000
    rng = random.Random(0)
    save_step(tmp_path, 1, elements)
    last_saved, typical_s, in_the_middle = 1, 0.03, 0
    for _ in range(kills):
        with saving_process(tmp_path, last_saved + 1, elements) as (child, events):

            def told(expected: str, events: Any = events) -> int:
                assert events.poll(60), "the saving process tells nothing"
                event, step = events.recv()
                assert event == expected
                return step

            for _ in range(rng.randrange(3)):  # the first save of a process is slower than the others: kill in both
                told("begins")
                began = time.perf_counter()
                last_saved = told("ended")
                typical_s = time.perf_counter() - began
            told("begins")
            time.sleep(rng.uniform(0, 1.2 * typical_s))  # this is the random moment, not a wait for something
            os.kill(child.pid, signal.SIGKILL)
            child.join(timeout=30)
            assert child.exitcode == -signal.SIGKILL
            with contextlib.suppress(EOFError):
                while events.poll(0):
                    event, step = events.recv()
                    last_saved = step if event == "ended" else last_saved

        in_the_middle += any(path.name.startswith(".saving-") for path in tmp_path.iterdir())
        for path in find_checkpoints(tmp_path):
            verify_checkpoint(path)
        found = newest_whole_checkpoint(tmp_path)
        assert found is not None
        path, manifest = found
        assert path.name == checkpoint_name(manifest.step)
        assert manifest.step >= last_saved
        assert manifest.sequences == 4 * manifest.step
        assert_same_tensors(read_independently(path), tensors_of(manifest.step, elements))
        last_saved = manifest.step
    assert in_the_middle > kills // 4, "the kills did not hit the saves"

    save_step(tmp_path, last_saved + 1, elements)
    prune_checkpoints(tmp_path, 2)
    left = [checkpoint_name(step) for step in (last_saved, last_saved + 1)]
    assert names_in(tmp_path) == left, "leftovers of the kills are still there"


# A process that is stopped


def save_beside_a_stopped_rank(rank: int, folder: Path) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{rank}.json")
    Heartbeats.LEAST_S = 1.0
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    with comm.process_group(torch.device("cpu"), step_timeout_s=1.0, store=store, rank=rank, world_size=2):
        if rank == 1:
            checkpoint.write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[assignment]
        save_step(folder / "checkpoints", 2)


def test_a_rank_that_is_stopped_in_a_save_is_not_waited_for_as_for_a_disk(tmp_path: Path) -> None:
    save_step(tmp_path / "checkpoints", 1)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=save_beside_a_stopped_rank, args=(rank, tmp_path)) for rank in range(2)]
    try:
        for rank in ranks:
            rank.start()
        ranks[0].join(timeout=60)
        assert ranks[0].exitcode == 1
        assert ranks[1].is_alive()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(timeout=30)
    said = json.loads((tmp_path / "error-0.json").read_text())["message"]["message"]
    path = tmp_path / "checkpoints" / checkpoint_name(2)
    assert said == f"rank 0: saving of {path}: rank 1 stood still for 1 s: it is gone or hangs"
    found = newest_whole_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert found[0].name == checkpoint_name(1)


# A full disk


def assert_one_line(err: str, *parts: str) -> None:
    (line,) = err.splitlines()
    assert line.startswith("cs336: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("limit", [0, 100, 100_000, 400_000, 800_000])
def test_a_file_that_cannot_grow_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path, limit: int) -> None:
    save_step(tmp_path, 1)
    needed = max(tensor_file(tmp_path / checkpoint_name(1)).stat().st_size, 1)
    with largest_file(limit):
        error = error_of(lambda: save_step(tmp_path, 2))
    if limit >= needed:
        assert error is None
        assert_whole(tmp_path / checkpoint_name(2))
        return
    assert_checkpoint_error(error, tmp_path / checkpoint_name(2), "File too large")
    assert names_in(tmp_path) == [checkpoint_name(1)]
    assert_whole(tmp_path / checkpoint_name(1))


def test_a_run_that_may_not_write_ends_with_1_and_one_line_and_keeps_the_older_checkpoint(tmp_path: Path) -> None:
    config = make_config(tmp_path, train=dict(max_steps=5), checkpoint=dict(checkpointing_interval=5))
    train(config)
    longer = make_config(tmp_path, resume="auto", checkpoint=dict(checkpointing_interval=5))
    size = tensor_file(checkpoint_path(config, 5)).stat().st_size

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    done = run_train(longer, preexec_fn=limit)
    assert done.returncode == 1, done.stderr
    assert_one_line(done.stderr, str(checkpoint_path(config, 10)), "File too large")
    assert checkpoint_names(config) == [checkpoint_name(5)]
    verify_checkpoint(checkpoint_path(config, 5))


def test_a_full_disk_ends_the_run_with_1_and_one_line_and_keeps_the_older_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = make_config(tmp_path, "probe", train=dict(max_steps=1))
    size = tensor_file(Path(train(probe).checkpoint)).stat().st_size
    with small_disk(tmp_path / "disk", int(2.5 * size)) as disk:
        checkpoints = [f"--train.max_steps={15}", "--checkpoint.checkpointing_interval=5"]
        config = make_config(tmp_path, "disk/run")
        (tmp_path / "config.json").write_text((tmp_path / "probe" / "config.json").read_text())
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["train", "--config", str(tmp_path / "config.json"), f"--run_dir={disk / 'run'}", *checkpoints])
        assert ended.value.code == 1
        assert_one_line(capsys.readouterr().err, str(checkpoint_path(config, 15)), "No space left on device")
        assert checkpoint_names(config) == [checkpoint_name(5), checkpoint_name(10)]
        for step in (5, 10):
            verify_checkpoint(checkpoint_path(config, step))
