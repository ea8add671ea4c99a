"""A model of blocks whose use the caller chooses, for the tests of FSDP, and helpers that inspect its training."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.parallel import comm
from cs336_systems.parallel.fsdp import FSDP
from tests.parallel.models import assert_close


def build_blocks(in_order: bool = True) -> "Blocks":
    torch.manual_seed(0)
    return Blocks(in_order)


class Block(nn.Module):
    """A block whose weights have 7 rows, which no tested number of ranks divides, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Blocks(nn.Module):
    """Which blocks are used is said by the caller. May be registered in another order than it computes."""

    def __init__(self, in_order: bool = True) -> None:
        super().__init__()
        parts = {
            "inlet": nn.Linear(3, 6),
            "blocks": nn.ModuleList(Block() for _ in range(4)),
            "head": nn.Linear(6, 5),
        }
        for name, part in parts.items() if in_order else reversed(parts.items()):
            self.add_module(name, part)

    def forward(self, x: Tensor, use: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:
        x = self.inlet(x)
        for i in use:
            x = self.blocks[i](x)
        return self.head(x)


def inputs_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def gradients(strategy: FSDP) -> dict[str, Tensor | None]:
    """Averaged gradients, put together from the shards of all ranks."""
    found: dict[str, Tensor | None] = {}
    shards = strategy.shards()
    for name, p in strategy.module.named_parameters():
        found[name] = None if p.grad is None else p.grad.cpu()
        if p.grad is not None and name in shards:
            assert p.grad.shape == p.shape
            assert p.grad.dtype == p.dtype
            shape, first = shards[name]
            found[name] = torch.zeros(shape, dtype=p.dtype)
            found[name][first : first + len(p)] = p.grad.cpu()
    of_ranks = comm.all_gather_objects(found, "test")
    for name in shards:
        if found.get(name) is not None:
            found[name] = sum(of_rank[name] for of_rank in of_ranks)
    return found


def expected_gradients(
    losses: list[Callable[[nn.Module], Tensor | None]], build: Callable[[], nn.Module] = build_blocks
) -> dict[str, Tensor | None]:
    """Gradients of the mean of the ranks' losses, in one process; None for parameters that no loss uses."""
    model = build()
    for loss in losses:
        (loss(model) / len(losses)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], what: str = "") -> None:
    assert {n for n, g in found.items() if g is None} == {n for n, g in expected.items() if g is None}, what
    assert_close(
        {n: g for n, g in found.items() if g is not None}, {n: g for n, g in expected.items() if g is not None}
    )


def some_loss(rank: int, use: tuple[int, ...], step: int, model: nn.Module) -> Tensor:
    x = inputs_of(rank, step).to(next(model.parameters()).device)
    return model(x, use).square().mean()


class Recorder:
    """Records transfers and computation in order, and how many groups are unsharded at most."""

    def __init__(self, strategy: FSDP) -> None:
        self.events: list[str] = []
        self.most = 0
        self._groups = strategy._groups
        comm.start_all_gather = self._wrap(comm.start_all_gather)
        comm.start_reduce_scatter_mean = self._wrap(comm.start_reduce_scatter_mean)
        for fsdp_module in strategy._fsdp_modules:
            record = partial(self._computes, fsdp_module.name)
            fsdp_module.module.register_forward_pre_hook(lambda *_, record=record: record("forward"))
            fsdp_module.module.register_forward_hook(lambda m, i, output, record=record: self._watch(output, record))

    def _computes(self, name: str, what: str) -> None:
        self.events.append(f"{what} {name}")

    def _watch(self, output: Tensor, record: Callable[[str], None]) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: record("backward"))  # after the strategy's own hook

    def _wrap(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(outputs: Any, inputs: Any, what: str) -> Any:
            self.events.append(what.replace("of ", "").replace("layers.", ""))
            whole = [group for group in self._groups if group.unsharded.is_allocated()]
            self.most = max(self.most, len(whole))
            return start(outputs, inputs, what)

        return recorded

    def take(self) -> list[str]:
        events, self.events = [e.replace("layers.", "") for e in self.events], []
        return events


class PlannedError(Exception):
    pass


def fail_once(*_: Any) -> None:
    raise PlannedError
