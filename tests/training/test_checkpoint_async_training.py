"""Saving in the background while a model trains saves the state at the call, on a CPU and on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem

from cs336_systems.training.async_saver import AsyncSaver
from cs336_systems.training.checkpoint import save_checkpoint
from cs336_systems.training.loop import Trainer
from cs336_systems.training.manifest import Manifest
from cs336_systems.training.state import collect_state

from .helpers import assert_same_tensors, make_config, read_independently, tensors_of, tiny_trainer
from .test_checkpoint_async import REST, held_back

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
