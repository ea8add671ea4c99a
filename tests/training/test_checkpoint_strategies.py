"""With the strategies as they are: a run that one division over ranks has saved goes on under every other."""

import collections
from collections.abc import Sequence
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
SOME = (3,)
"""How far behind each way another comes, so that weights and optimizers that are whole and sharded follow another."""


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


def resume_each(pairs: list[tuple[Way, Path]], folder: Path) -> list[tuple[Path, Path, dict[str, Tensor]]]:
    """Resume in each way from its source and save again. The source, the new checkpoint, the weights a step later."""
    results = []
    for number, (way, source) in enumerate(pairs):
        wrapped, optimizer = make(way)
        step(wrapped, optimizer, 9)  # so that there is a state to be replaced
        restore_state(source, wrapped.module, optimizer, CPU, wrapped.shards())
        tensors = collect_state(wrapped.module, optimizer, CPU, wrapped.shards())
        again = save_checkpoint(folder / str(number), tensors, Manifest(step=1, **REST))
        step(wrapped, optimizer, 3)
        results.append((source, again, {name: t.clone() for name, t in wrapped.full_state_dict().items()}))
    return results


def whole(path: Path) -> dict[str, Tensor]:
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_shapes(path).items()}
    read_tensors(path, tensors)
    return tensors


def save_all(root: Path) -> dict[Path, dict[str, Tensor]]:
    """Checkpoints of all ways, with the weights that each had a step later."""
    later = {}
    for world_size, ways in WAYS.items():
        folders = [root / f"saved-{world_size}-{i}" for i in range(len(ways))]
        weights = run_ranks(save_each, world_size, ways, folders)[0]
        later.update(zip([folder / checkpoint_name(1) for folder in folders], weights, strict=True))
    return later


@pytest.mark.parametrize("behind", [SOME, pytest.param(range(8), marks=pytest.mark.slow)])
def test_every_way_of_training_goes_on_from_every_other(tmp_path: Path, behind: Sequence[int]) -> None:
    """Without -m slow from some: what a checkpoint holds does not depend on who goes on with it."""
    saved, first, resumed = save_all(tmp_path), 0, []
    sources = list(saved)
    for world_size, ways in WAYS.items():
        pairs = [(way, sources[(i + far) % len(sources)]) for i, way in enumerate(ways, first) for far in behind]
        resumed += run_ranks(resume_each, world_size, pairs, tmp_path / f"again-{world_size}")[0]
        first += len(ways)
    assert collections.Counter(source for source, _, _ in resumed) == dict.fromkeys(sources, len(behind))
    for source, again, weights in resumed:
        assert_same_tensors(whole(again), whole(source))
        for name, tensor in saved[source].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
