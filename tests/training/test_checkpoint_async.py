"""A checkpoint saved in the background is the same as one saved in the foreground, and its errors are raised."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import filesystem

from cs336_systems.parallel import comm
from cs336_systems.training import checkpoint
from cs336_systems.training.async_saver import AsyncSaver
from cs336_systems.training.checkpoint import CheckpointError, save_checkpoint
from cs336_systems.training.loop import Trainer
from cs336_systems.training.manifest import (
    MANIFEST,
    Manifest,
    checkpoint_name,
    find_checkpoints,
    verify_checkpoint,
)
from cs336_systems.training.state import collect_state
from cs336_systems.training.tensor_files import Rows, read_tensors

from ..distributed import run_ranks
from .helpers import (
    REST,
    assert_same_tensors,
    error_of,
    largest_file,
    make_config,
    raw_bytes,
    read_independently,
    tensors_of,
    tiny_trainer,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
            assert comm.all_gather_objects(number, "training") == [number] * comm.world_size()
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


# While a model trains

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def state_of(trainer: Trainer) -> dict[str, Any]:
    return collect_state(trainer.model, trainer.optimizer, trainer.device)


def kept_apart(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state as it is when the GPU comes to this, without waiting for that."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in state.items()}


@pytest.mark.parametrize(
    "device, implementation, cuda_graph",
    [
        ("cpu", "own", False),
        ("cpu", "torch_fused", False),
        pytest.param("cuda", "own", False, marks=pytest.mark.gpu),
        pytest.param("cuda", "torch_fused", False, marks=pytest.mark.gpu),
        pytest.param("cuda", "torch_foreach", False, marks=pytest.mark.gpu),
        pytest.param("cuda", "torch_fused", True, marks=pytest.mark.gpu),
    ],
)
def test_steps_during_a_save_do_not_change_the_saved_state(
    device: str, implementation: str, cuda_graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = dict(device=device, cuda_graph=cuda_graph)
    config = make_config(tmp_path, optimizer=dict(implementation=implementation), train=train)
    with tiny_trainer(config, device=device) as trainer, AsyncSaver() as saver:
        for _ in range(3):  # the second and third go into the copies of the first; step 3 is the one that is recorded
            for _ in range(2):
                trainer.train_step()
            with held_back(monkeypatch) as go_on:
                state = state_of(trainer)
                expected = kept_apart(state)
                path = saver.save(tmp_path, state, Manifest(step=trainer.position.step, **REST))
                for _ in range(2):
                    trainer.train_step()
                go_on()
                saver.wait()
            saved, expected = read_independently(path), on_cpu(expected)
            assert_same_tensors(saved, expected)
            changed = [name for name, now in on_cpu(state_of(trainer)).items() if not torch.equal(now, saved[name])]
            assert any(name.startswith("model.") for name in changed), "nothing was trained meanwhile"
            assert any(name.endswith("exp_avg") for name in changed)


@pytest.mark.gpu
def test_a_save_waits_for_work_queued_before_it_and_not_for_later_work(tmp_path: Path) -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    second = int(1e9)  # clock cycles, about
    with AsyncSaver() as saver:
        # The first save makes the pinned copy, which may wait for the GPU.
        saver.save(tmp_path, {"weight": weight}, Manifest(step=1, **REST))
        saver.wait()
        torch.cuda._sleep(second)
        weight.fill_(1)
        path = saver.save(tmp_path, {"weight": weight}, Manifest(step=2, **REST))
        assert not torch.cuda.current_stream().query(), "the call has waited for the GPU"
        assert not path.exists()
        weight.fill_(2)  # as the next step's update does, in the same queue
        saver.wait()
    assert bool((read_independently(path)["weight"] == 1).all())


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_the_copies_are_made_once(device: str, tmp_path: Path) -> None:
    config = make_config(tmp_path, optimizer=dict(implementation="torch_fused"), train=dict(device=device))
    with tiny_trainer(config, device=device) as trainer, AsyncSaver() as saver:
        places = []
        for _ in range(3):
            trainer.train_step()
            state = state_of(trainer)
            saver.save(tmp_path, state, Manifest(step=trainer.position.step, **REST))
            places.append({name: copy.data_ptr() for name, copy in saver._buffers.items()})
            assert saver._buffers.keys() == state.keys()
            for name, copy in saver._buffers.items():
                assert copy.device.type == "cpu"
                assert copy.data_ptr() != state[name].data_ptr()
                if state[name].is_cuda:  # all but the generators' states, and step counters of some optimizers
                    assert copy.is_pinned(), name
        assert places[0] == places[1] == places[2]
        assert any(tensor.is_cuda for tensor in state.values()) == (device == "cuda")
    assert saver._buffers == {}


def test_tensors_in_main_memory_are_written_without_waiting_for_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is a GPU, PyTorch's writer copies ahead from it, and waits for all of its work."""

    def ahead(*_: Any, **__: Any) -> Any:
        raise AssertionError("copies ahead")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", ahead)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = save_checkpoint(tmp_path, tensors_of(1), Manifest(step=1, **REST))
    assert_same_tensors(read_independently(path), tensors_of(1))
