"""Threads of a rank use the rank's GPU. One begins on GPU 0, where it would make a context for each rank."""

import threading
from pathlib import Path

import pytest
import torch

from cs336_systems.parallel import comm
from cs336_systems.parallel.failure import Watchdog
from cs336_systems.training.async_saver import AsyncSaver
from cs336_systems.training.batches import BatchLoader
from cs336_systems.training.manifest import Manifest
from tests.distributed import run_ranks
from tests.training.helpers import REST, make_config, random_tokens, tiny_trainer

GPU = torch.device("cuda", 3)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Which GPU each thread has made its own, by the thread's name."""
    found: dict[str, int] = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: found.update({threading.current_thread().name: device})
    )
    return found


def test_the_watchdog(used: dict[str, int]) -> None:
    before = set(threading.enumerate())
    watchdog = Watchdog(0.1, GPU)
    watchdog.stop()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=10)
    assert used == {"watchdog asking": 3}


def test_the_loader(used: dict[str, int]) -> None:
    loader = BatchLoader(random_tokens(), 16, 0, GPU)
    loader._pool.submit(lambda: None).result(timeout=10)
    loader.close()
    assert used == {"batches_0": 3}


def contexts_after_training(folder: str) -> list[bool]:
    """On which GPUs this rank has made a context, after steps and a save in the background."""
    config = make_config(Path(folder), parallel=dict(strategy="bucketed"), train=dict(device="cuda"))
    with tiny_trainer(config, device=f"cuda:{comm.rank()}") as trainer, AsyncSaver() as saver:
        for step in range(1, 4):
            trainer.train_step()
            saver.save(Path(folder), trainer.model.state_dict(), Manifest(step=step, **REST))
    return [torch._C._cuda_hasPrimaryContext(gpu) for gpu in range(comm.world_size())]


@pytest.mark.multigpu
def test_a_rank_makes_a_context_on_its_own_gpu_alone(tmp_path: Path) -> None:
    assert run_ranks(contexts_after_training, 2, str(tmp_path), device="cuda") == [[True, False], [False, True]]
