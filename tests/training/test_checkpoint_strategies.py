"""With the strategies as they are: a run that one division over ranks has saved goes on under every other."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cs336_basics.model import TransformerLM
from cs336_systems.parallel import STRATEGIES, Options, Strategy
from cs336_systems.parallel.zero1 import ShardedOptimizer
from cs336_systems.parallel.zero1_simple import SimpleShardedOptimizer
from cs336_systems.training.checkpoint import save_checkpoint
from cs336_systems.training.manifest import Manifest, checkpoint_name
from cs336_systems.training.state import collect_state, restore_state
from cs336_systems.training.tensor_files import read_tensors, tensor_shapes

from ..distributed import run_ranks
from .helpers import REST, assert_same_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
Way = tuple[str, bool | str]  # strategy, and whether the optimizer is sharded, "simple" by the readable version
WAYS: dict[int, list[Way]] = {
    1: [("none", False), ("fsdp", False)],
    2: [("bucketed", False), ("bucketed", True), ("fsdp_simple", False), ("torch_fsdp", False)],
    3: [("fsdp", False), ("naive", "simple")],
}


def make(way: Way) -> tuple[Strategy, torch.optim.Optimizer]:
    strategy, sharded = way
    torch.manual_seed(0)
    wrapped = STRATEGIES[strategy](TransformerLM(50, 8, 16, 2, 2, 24), Options())
    parameters = wrapped.trainable()
    if sharded:
        cls = SimpleShardedOptimizer if sharded == "simple" else ShardedOptimizer
        return wrapped, cls(parameters, torch.optim.AdamW, lr=1e-2)
    return wrapped, torch.optim.AdamW(parameters, lr=1e-2)


def step(wrapped: Strategy, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(seed))
    wrapped(tokens).logsumexp(-1).mean().backward()
    wrapped.finish_gradient_synchronization()
    optimizer.step()
    optimizer.zero_grad()


def save_each(ways: list[Way], folders: list[Path]) -> list[dict[str, Tensor]]:
    """Two steps and a save in each way; the weights after a third."""
    results = []
    for way, folder in zip(ways, folders, strict=True):
        wrapped, optimizer = make(way)
        for seed in (1, 2):
            step(wrapped, optimizer, seed)
        save_checkpoint(
            folder, collect_state(wrapped.module, optimizer, CPU, wrapped.shards()), Manifest(step=1, **REST)
        )
        step(wrapped, optimizer, 3)
        results.append({name: tensor.clone() for name, tensor in wrapped.full_state_dict().items()})
    return results


def resume_each(
    ways: list[Way], sources: list[Path], apart: int, folder: Path
) -> list[tuple[Path, Path, dict[str, Tensor]]]:
    """Resume in each way from sources so far apart and save again.

    The source, the new checkpoint, the weights a step later.
    """
    results = []
    for i, way in enumerate(ways):
        for number, source in [*enumerate(sources)][i % apart :: apart]:
            wrapped, optimizer = make(way)
            step(wrapped, optimizer, 9)  # so that there is a state to be replaced
            restore_state(source, wrapped.module, optimizer, CPU, wrapped.shards())
            tensors = collect_state(wrapped.module, optimizer, CPU, wrapped.shards())
            again = save_checkpoint(folder / f"{way}-{number}", tensors, Manifest(step=1, **REST))
            step(wrapped, optimizer, 3)
            results.append((source, again, {name: t.clone() for name, t in wrapped.full_state_dict().items()}))
    return results


def whole(path: Path) -> dict[str, Tensor]:
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_shapes(path).items()}
    read_tensors(path, tensors)
    return tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, dict[str, Tensor]]:
    """Checkpoints of all ways, with the weights that each had a step later."""
    later = {}
    for world_size, ways in WAYS.items():
        folders = [tmp_path_factory.mktemp("saved") for _ in ways]
        weights = run_ranks(save_each, world_size, ways, folders)[0]
        later.update(zip([folder / checkpoint_name(1) for folder in folders], weights, strict=True))
    return later


@pytest.mark.parametrize("apart", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", WAYS)
def test_every_way_of_training_goes_on_from_every_other(
    tmp_path: Path, saved: dict[Path, dict[str, Tensor]], world_size: int, apart: int
) -> None:
    """Without -m slow from every second: what a checkpoint holds does not depend on who goes on with it."""
    ways = WAYS[world_size]
    resumed = run_ranks(resume_each, world_size, ways, list(saved), apart, tmp_path)[0]
    assert len(resumed) == len(ways) * len(saved) // apart
    assert {source for source, _, _ in resumed} == set(saved)
    for source, again, weights in resumed:
        assert_same_tensors(whole(again), whole(source))
        for name, tensor in saved[source].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
