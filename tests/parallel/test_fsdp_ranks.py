"""FSDP when ranks use different weights, and leave weights unused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import comm
from cs336_systems.parallel.fsdp import FSDP
from tests.distributed import run_ranks
from tests.parallel.blocks import (
    Blocks,
    PlannedError,
    assert_same_gradients,
    build_blocks,
    expected_gradients,
    fail_once,
    gradients,
    some_loss,
)

USES = [
    [(0, 1, 2, 3), (0, 1, 2, 3)],
    [(0, 1, 2, 3), (0, 2, 3)],
    [(1, 2), (0, 3)],
    [(), (0, 1, 2, 3)],
    [(0, 1, 3), (0, 1, 3)],
    [(2, 2), (2, 2)],  # out of turn
    [(0,), (3,)],
]


def use_differently(
    uses: list[list[tuple[int, ...]]], in_order: bool = True, reshard_after_forward: bool = True, device: str = "cpu"
) -> list[dict[str, Tensor | None]]:
    strategy = FSDP(build_blocks(in_order).to(device), reshard_after_forward=reshard_after_forward)
    found = []
    for step, use in enumerate(uses):
        strategy.zero_grad()
        some_loss(comm.rank(), use[comm.rank()], step, strategy).backward()
        strategy.finish_gradient_synchronization()
        assert strategy.gathered_bytes() == 0
        found.append(gradients(strategy))
    return found


def check_uses(uses: list[list[tuple[int, ...]]], *args: Any, device: str = "cpu") -> None:
    for of_rank in run_ranks(partial(use_differently, device=device), 2, uses, *args, device=device):
        for step, use in enumerate(uses):
            losses = [partial(some_loss, rank, u, step) for rank, u in enumerate(use)]
            assert_same_gradients(of_rank[step], expected_gradients(losses))


@pytest.mark.parametrize("first", range(len(USES)))
def test_ranks_may_use_different_weights(first: int) -> None:
    check_uses((USES[first:] + USES[:first])[:4])  # whichever comes first, when the order is learned


@pytest.mark.parametrize("in_order, reshard_after_forward", [(False, True), (True, False), (False, False)])
def test_ranks_may_use_different_weights_in_any_order_and_keep_them_whole(
    in_order: bool, reshard_after_forward: bool
) -> None:
    check_uses(USES, in_order, reshard_after_forward)


@pytest.mark.multigpu
def test_ranks_may_use_different_weights_nccl() -> None:
    check_uses(USES, device="cuda")


class Partly(nn.Module):
    """An embedding tied to the head, and a block of two dtypes, so two groups; a rank may use a part of either."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, 6)
        block = nn.ModuleDict({"first": nn.Linear(6, 6), "second": nn.Linear(6, 6, dtype=torch.float64)})
        block.forward = partial(self.block_forward, block)
        self.blocks = nn.ModuleList([block])
        self.head = nn.Linear(6, 8)
        self.head.weight = self.embedding.weight

    @staticmethod
    def block_forward(block: nn.ModuleDict, x: Tensor, all_of_it: bool) -> Tensor:
        x = block["first"](x)
        return block["second"](x.double()).float() if all_of_it else x

    def forward(self, rank: int, embeds: bool, all_of_it: bool) -> Tensor:
        ids = torch.arange(rank, rank + 4)
        x = self.embedding(ids) if embeds else torch.ones(4, 6)
        return self.head(self.blocks[0](x, all_of_it)).square().mean()


PARTS = [[(True, True), (False, True)], [(True, True), (True, False)], [(False, True), (True, False)]]


def use_parts(reshard_after_forward: bool) -> list[dict[str, Tensor | None]]:
    strategy = FSDP(Partly(), reshard_after_forward=reshard_after_forward)
    found = []
    for parts in PARTS:
        strategy.zero_grad()
        strategy(comm.rank(), *parts[comm.rank()]).backward()
        strategy.finish_gradient_synchronization()
        found.append(gradients(strategy))
    return found


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_ranks_may_use_different_parts_of_a_module_and_different_users_of_a_weight(reshard_after_forward: bool) -> None:
    for found in run_ranks(use_parts, 2, reshard_after_forward):
        for of_step, parts in zip(found, PARTS, strict=True):
            losses = [lambda model, rank=rank, its=its: model(rank, *its) for rank, its in enumerate(parts)]
            assert_same_gradients(of_step, expected_gradients(losses, Partly))


Uses = list[list[tuple[int, ...]]]
"""By rank, the blocks that each of two forward passes uses."""


def build_with_frozen_inlet() -> Blocks:
    """Where no block is used, backward reaches the head alone."""
    model = build_blocks()
    model.inlet.requires_grad_(False)
    return model


def sum_of_losses(uses: Uses, rank: int, model: nn.Module) -> Tensor:
    return sum(some_loss(rank, use, step, model) for step, use in enumerate(uses[rank]))


def use_differently_before_one_backward(
    build: Callable[[], nn.Module], uses: Uses, reshard_after_forward: bool
) -> dict[str, Tensor | None]:
    strategy = FSDP(build(), reshard_after_forward=reshard_after_forward)
    for _ in range(2):  # the order is learned in the first of them
        strategy.zero_grad()
        sum_of_losses(uses, comm.rank(), strategy).backward()
        strategy.finish_gradient_synchronization()
        assert strategy.gathered_bytes() == 0
    return gradients(strategy)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(
    "build, uses",
    [
        (build_blocks, [[(0, 1, 2, 3), (0, 1)], [(0, 3), (2,)]]),
        (build_with_frozen_inlet, [[(), ()], [(3,), (3,)]]),  # on rank 0 backward reaches the last group alone
    ],
    ids=["blocks", "the head alone"],
)
def test_ranks_may_use_different_weights_in_several_forwards_of_one_backward(
    build: Callable[[], nn.Module], uses: Uses, reshard_after_forward: bool
) -> None:
    expected = expected_gradients([partial(sum_of_losses, uses, rank) for rank in range(2)], build)
    for found in run_ranks(use_differently_before_one_backward, 2, build, uses, reshard_after_forward):
        assert_same_gradients(found, expected)


class HandingOn(nn.Module):
    """Blocks that hand an input on: all of them the memory, and one that is off also its x."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor, memory: Tensor, on: bool) -> tuple[Tensor, Tensor]:
            return (x + self.inner(x + memory).relu() if on else x), memory

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor, on: str) -> Tensor:
        x = self.inlet(x)
        memory = self.encoder(x)
        for block, letter in zip(self.blocks, on, strict=True):
            x, memory = block(x, memory, letter == "1")
        return self.head(x)


def handing_on_loss(rank: int, step: int, on: str, model: nn.Module) -> Tensor:
    torch.manual_seed(10 * step + rank)
    return model(torch.randn(3, 6), on).square().mean()


ON = [("1111", "1111"), ("1101", "1101"), ("1000", "1000"), ("1111", "1011")]
"""By rank, the blocks that are on."""


def hand_on_all(reshard_after_forward: bool) -> list[list[dict[str, Tensor | None]]]:
    return [hand_on(on, reshard_after_forward) for on in ON]


def hand_on(on: tuple[str, str], reshard_after_forward: bool) -> list[dict[str, Tensor | None]]:
    strategy = FSDP(HandingOn(), reshard_after_forward=reshard_after_forward)
    found = []
    for step in range(2):
        strategy.zero_grad()
        handing_on_loss(comm.rank(), step, on[comm.rank()], strategy).backward()
        strategy.finish_gradient_synchronization()
        found.append(gradients(strategy))
    return found


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_a_module_may_hand_its_inputs_on(reshard_after_forward: bool) -> None:
    for on, *of_ranks in zip(ON, *run_ranks(hand_on_all, 2, reshard_after_forward), strict=True):
        for step in range(2):
            losses = [partial(handing_on_loss, rank, step, on[rank]) for rank in range(2)]
            expected = expected_gradients(losses, HandingOn)
            for steps in of_ranks:
                assert_same_gradients(steps[step], expected)


def forget_an_aborted_pass() -> list[bool]:
    strategy = FSDP(build_blocks())
    some_loss(comm.rank(), (0,), 0, strategy).backward()
    strategy.finish_gradient_synchronization()
    strategy.zero_grad()
    handle = strategy.module.inlet.register_full_backward_hook(fail_once)
    with pytest.raises(PlannedError):
        some_loss(comm.rank(), (2, 3), 1, strategy).backward()
    handle.remove()
    for p in strategy.parameters():  # as an optimizer's zero_grad, which knows nothing of a pass
        p.grad = None
    some_loss(comm.rank(), (0,), 2, strategy).backward()
    strategy.finish_gradient_synchronization()
    return [p.grad is None for name, p in strategy.module.named_parameters() if name.startswith("blocks.3.")]


def test_weights_of_an_aborted_backward_pass_have_no_gradient_in_the_next() -> None:
    for found in run_ranks(forget_an_aborted_pass, 2):
        assert found
        assert all(found)
