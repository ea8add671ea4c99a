"""FSDP beyond one forward and one backward: aborted, repeated and checkpointed passes, shared and frozen weights."""

import operator
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cs336_systems.parallel import STRATEGIES, Options, comm
from cs336_systems.parallel.fsdp import FSDP
from tests.distributed import run_ranks
from tests.parallel.blocks import (
    Block,
    PlannedError,
    Recorder,
    assert_same_gradients,
    build_blocks,
    expected_gradients,
    fail_once,
    gradients,
    inputs_of,
    some_loss,
)
from tests.parallel.models import adamw, assert_close, for_each, message_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
KINDS = (
    "after evaluation",
    "after forward alone",
    "after an error in forward",
    "after an error in backward",
    "two forwards, one backward",
    "two forwards, two backwards",
    "checkpointed outside",
    "the module itself",
)


def passes(kind: str, reshard_after_forward: bool) -> dict[str, Tensor | None]:
    strategy = FSDP(build_blocks(), reshard_after_forward=reshard_after_forward)
    rank = comm.rank()
    every = (0, 1, 2, 3)
    if kind == "after evaluation":
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                some_loss(rank, every, 5, strategy)
                some_loss(rank, (1,), 5, strategy)
                assert strategy.gathered_bytes() == 0
    if kind == "after forward alone":
        losses = [some_loss(rank, every, 5, strategy) for _ in range(3)]
        kept = strategy._groups[-1:] if reshard_after_forward else strategy._groups
        assert strategy.gathered_bytes() == sum(group.unsharded.nbytes for group in kept)
        del losses
    if kind == "after an error in forward":
        hook = strategy.module.blocks[2].up.register_forward_hook(fail_once)
        with pytest.raises(PlannedError):
            some_loss(rank, every, 5, strategy)
        assert strategy.module.blocks[2].up.weight.shape == (4 if rank == 0 else 3, 6)
        hook.remove()
    if kind == "after an error in backward":
        handle = strategy.module.blocks[1].register_full_backward_pre_hook(fail_once)
        with pytest.raises(PlannedError):
            some_loss(rank, every, 5, strategy).backward()
        handle.remove()
        strategy.finish_gradient_synchronization()
        strategy.zero_grad()
    if kind == "two forwards, one backward":
        (some_loss(rank, every, 0, strategy) + some_loss(rank, every, 1, strategy)).backward()
    elif kind == "two forwards, two backwards":
        losses = [some_loss(rank, every, step, strategy) for step in range(2)]
        for loss in losses:
            loss.backward()
    elif kind == "checkpointed outside":
        for step in range(2):
            x = strategy.module.inlet(inputs_of(rank, step)) if step else None
            with_checkpoints(strategy, rank, step, x).backward()
    elif kind == "the module itself":
        for step in range(2):
            some_loss(rank, every, step, strategy.module).backward()
    else:
        for step in range(2):
            with strategy.no_sync():
                some_loss(rank, every, step, strategy).backward()
    strategy.finish_gradient_synchronization()
    assert strategy.gathered_bytes() == 0
    return gradients(strategy)


def with_checkpoints(strategy: FSDP, rank: int, step: int, x: Tensor | None) -> Tensor:
    """The loss with every block checkpointed, from outside of it: in two pairs, or each by itself."""
    blocks = strategy.module.blocks

    def forward(x: Tensor, use: Any = None) -> Tensor:
        x = strategy.module.inlet(x)
        pieces = [[0, 1], [2, 3]] if step else [[0], [1], [2], [3]]
        for piece in pieces:
            x = checkpoint(nn.Sequential(*(blocks[i] for i in piece)), x, use_reentrant=False)
        return strategy.module.head(x)

    original, strategy.module.forward = strategy.module.forward, forward
    try:
        return some_loss(rank, (), step, strategy)
    finally:
        strategy.module.forward = original


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_irregular_passes(reshard_after_forward: bool) -> None:
    def both(rank: int, model: nn.Module) -> Tensor:
        return some_loss(rank, (0, 1, 2, 3), 0, model) + some_loss(rank, (0, 1, 2, 3), 1, model)

    expected = expected_gradients([partial(both, rank) for rank in range(2)])
    function = partial(passes, reshard_after_forward=reshard_after_forward)
    for of_kinds in run_ranks(for_each, 2, KINDS, function):
        for kind, found in of_kinds.items():
            assert_same_gradients(found, expected, kind)


def call_a_block_by_itself() -> tuple[list[int], Tensor]:
    strategy = FSDP(build_blocks(), reshard_after_forward=False)
    some_loss(comm.rank(), (0, 1, 2, 3), 0, strategy).backward()
    left = []
    for value in (0.5, 0.25):
        strategy.finish_gradient_synchronization()
        with torch.no_grad():
            for p in strategy.parameters():
                p.fill_(value)
            output = strategy.module.blocks[1](torch.ones(2, 6))
        left.append(strategy.gathered_bytes())
    return left, output


def test_a_block_called_by_itself_has_the_weights_of_now_and_leaves_none_whole() -> None:
    block = Block()
    with torch.no_grad():
        for p in block.parameters():
            p.fill_(0.25)
        expected = block(torch.ones(2, 6))
    for left, output in run_ranks(call_a_block_by_itself, 2):
        assert left == [0, 0]
        torch.testing.assert_close(output, expected)


class CheckpointedEach(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inlet, self.layers = nn.Linear(4, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.square().sum()


def checkpointed_each(use_reentrant: bool) -> list[str]:
    strategy = FSDP(CheckpointedEach(use_reentrant))
    said = []
    for step in range(2):
        loss = strategy(torch.full((2, 4), 1.0 + step))
        said.append(message_of(loss.backward))
        strategy.zero_grad()
    return said


def test_checkpointing_that_would_give_wrong_gradients_is_refused() -> None:
    for said in run_ranks(checkpointed_each, 2, True):
        assert all("RuntimeError: a module in fsdp is checkpointed with use_reentrant=True" in each for each in said)
    for said in run_ranks(checkpointed_each, 2, False):
        assert said == ["nothing was raised"] * 2


def fail_after_a_recomputation() -> str:
    strategy = FSDP(CheckpointedEach(use_reentrant=False))
    handle = strategy.module.inlet.register_full_backward_pre_hook(fail_once)
    loss = strategy(torch.ones(2, 4))
    handle.remove()
    other = strategy(torch.ones(2, 4))
    with pytest.raises(PlannedError):
        loss.backward()
    return message_of(other.backward)


def test_a_backward_pass_that_failed_under_a_checkpoint_is_not_taken_for_a_reentrant_one() -> None:
    assert run_ranks(fail_after_a_recomputation, 2) == ["nothing was raised"] * 2


def changed_after_wrapping(trains: bool) -> str:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module.requires_grad_(trains)
    strategy = FSDP(module)
    module[0].bias.requires_grad_(not trains)
    return message_of(strategy.finish_gradient_synchronization)


def test_freezing_or_thawing_after_wrapping_is_refused() -> None:
    for trains, was in ((True, "trainable when its module was wrapped and is frozen now"), (False, "frozen when its ")):
        for said in run_ranks(changed_after_wrapping, 2, trains):
            assert said.startswith(f"ValueError: 0.bias was {was}")


# Frozen and shared weights


class Adapted(nn.Module):
    """Frozen blocks, the later ones with something to train; one block that is called twice, tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for block in self.blocks:
            block.requires_grad_(False)
        self.blocks[2].up.weight.requires_grad = True  # backward ends here: nothing before it trains
        self.blocks[3].down.weight.requires_grad = True  # and its backward precedes that of the frozen `up`
        self.blocks[3].up.weight = self.blocks[2].up.weight
        self.tied = nn.Parameter(torch.zeros(1))
        self.out = nn.Linear(6, 6)
        self.again = self.out

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 2, 3, 3):
            x = self.blocks[i](x)
        return self.again(self.out(x)) + self.tied


def adapted_loss(rank: int, step: int, model: nn.Module) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


def train_adapted(name: str, **options: Any) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    strategy = STRATEGIES[name](Adapted(), Options(**options))
    recorder = Recorder(strategy) if isinstance(strategy, FSDP) else None
    optimizer = adamw(strategy.parameters())
    events: list[str] = []
    for step in range(3):
        optimizer.zero_grad()
        adapted_loss(comm.rank(), step, strategy).backward()
        events = recorder.take() if recorder else []
        strategy.finish_gradient_synchronization()
        optimizer.step()
    return strategy.full_state_dict(), events


def test_frozen_shared_and_repeated_weights() -> None:
    torch.manual_seed(0)
    model = Adapted()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (sum(adapted_loss(rank, step, model) for rank in range(2)) / 2).backward()
        optimizer.step()
    for state, _ in run_ranks(train_adapted, 2, "fsdp_simple"):
        assert_close(state, model.state_dict(), **CLOSE)
    for reshard_after_forward in (True, False):
        train = partial(train_adapted, "fsdp", reshard_after_forward=reshard_after_forward)
        for state, events in run_ranks(train, 2):
            assert_close(state, model.state_dict(), **CLOSE)
            # Forward only: backward does not come so far.
            assert [e for e in events if re.search(r"gather blocks.[01]$", e)] == ["gather blocks.0", "gather blocks.1"]


class TiedByHand(nn.Module):
    """Uses the weight of its embedding without calling it, as many models do for their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.by_hand = nn.Embedding(6, 4), nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        assert (self.embedding.weight.dtype, self.embedding.weight.device.type) == (torch.float32, "cpu")  # harmless
        h = self.layer(self.embedding(x))
        return nn.functional.linear(h, self.embedding.weight) if self.by_hand else h


def tie_by_hand() -> str:
    module = TiedByHand()
    strategy = FSDP(module)
    parts = list(module.parameters())
    with pytest.raises(RuntimeError, match="outside") as error:
        strategy(torch.tensor([1, 5]))
    assert all(map(operator.is_, module.parameters(), parts))  # as before
    module.by_hand = False
    strategy(torch.tensor([1, 5])).sum().backward()
    strategy.finish_gradient_synchronization()
    assert strategy.full_state_dict()["embedding.weight"].shape == (6, 4)
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_weight_that_is_used_outside_of_its_module_is_refused_by_name(world_size: int) -> None:
    for said in run_ranks(tie_by_hand, world_size):
        assert said.startswith("embedding.weight was used outside of the calls of its module, where fsdp has a part")
