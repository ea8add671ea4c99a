"""FSDP on gloo (and NCCL): equal to one process, at most two groups unsharded, the same transfers on all ranks."""

import operator
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from cs336_basics.model import TransformerLM
from cs336_basics.nn_utils import clip_gradient
from cs336_systems.parallel import STRATEGIES, Options, comm
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.fsdp_param_group import ResizableBuffer
from tests.distributed import run_ranks
from tests.parallel.models import adamw, batch_of, build, mean_loss, message_of, sgd, train_alone, train_step
from tests.parallel.test_ddp import assert_close, assert_ranks_equal

STEPS = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
NAMES = pytest.mark.parametrize("name", ["fsdp", "fsdp_simple"])


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
    of_ranks = comm.gather_objects(found, "test")
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


def assert_same_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert {n for n, g in found.items() if g is None} == {n for n, g in expected.items() if g is None}
    assert_close(
        {n: g for n, g in found.items() if g is not None}, {n: g for n, g in expected.items() if g is not None}
    )


# -- equal to one process ----------------------------------------------------------------------------------------------


def prepare(module: nn.Module, how: str) -> None:
    """Compile or checkpoint the blocks, as training does: their inner forward."""
    for block in getattr(module, "layers", ()):
        if "checkpoint" in how:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if "aot_eager" in how or "inductor" in how:
            block.forward = torch.compile(block.forward, backend=how.split()[0], fullgraph="checkpoint" not in how)


def train_on_ranks(
    model: str,
    options: dict[str, Any],
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    micro_batches: int = 1,
    how: str = "",
    device: str = "cpu",
    name: str = "fsdp",
) -> dict[str, Tensor]:
    module = build(model, seed=comm.rank()).to(device)
    if how.endswith("before"):
        prepare(module, how)
    strategy = STRATEGIES[name](module, Options(**options))
    if not how.endswith("before"):
        prepare(module, how)
    optimizer = make_optimizer(module.parameters())
    for step in range(STEPS):
        mine = batch_of(step).to(device).chunk(comm.world_size())[comm.rank()]
        train_step(strategy, optimizer, mine, micro_batches)
    if "aot_eager" in how or "inductor" in how:
        # One compilation serves all blocks, forward and backward.
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return {key: value.cpu() for key, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("model", ["awkward", "transformer"])
@NAMES
def test_equals_one_process(name: str, model: str, world_size: int) -> None:
    states = run_ranks(train_on_ranks, world_size, model, {}, adamw, 1, "", "cpu", name)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone(model, STEPS), **CLOSE)


@pytest.mark.parametrize("model", ["awkward", "transformer"])
def test_the_simple_version_trains_to_the_same_bits(model: str) -> None:
    fast, simple = (run_ranks(train_on_ranks, 2, model, {}, adamw, 2, "", "cpu", name) for name in NAMES.args[1])
    assert_ranks_equal([*fast, *simple])


@pytest.mark.parametrize("model", ["awkward", "transformer"])
def test_weights_that_stay_whole_for_backward_train_to_the_same_bits(model: str) -> None:
    again, once = (run_ranks(train_on_ranks, 2, model, {"reshard_after_forward": r}, adamw, 2) for r in (True, False))
    for name, tensor in once[0].items():
        assert torch.equal(tensor, once[1][name])
        assert torch.equal(tensor, again[0][name])


@pytest.mark.parametrize("micro_batches", [2, 4])
@NAMES
def test_accumulation(name: str, micro_batches: int) -> None:
    states = run_ranks(train_on_ranks, 2, "awkward", {}, sgd, micro_batches, "", "cpu", name)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone("awkward", STEPS, sgd), **CLOSE)


@pytest.mark.parametrize(
    "how",
    [pytest.param("aot_eager", marks=pytest.mark.slow), "aot_eager before", "checkpoint", "aot_eager checkpoint"],
)
@NAMES
def test_blocks_that_are_compiled_or_checkpointed(name: str, how: str) -> None:
    states = run_ranks(train_on_ranks, 2, "transformer", {}, adamw, 2, how, "cpu", name)
    assert_close(states[0], train_alone("transformer", STEPS), **CLOSE)


@pytest.mark.slow
def test_blocks_compiled_by_inductor() -> None:
    states = run_ranks(train_on_ranks, 2, "transformer", {}, adamw, 1, "inductor", timeout_s=240)
    assert_close(states[0], train_alone("transformer", STEPS), **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": torch.bfloat16, "grad_dtype": torch.float32},
        {"grad_dtype": torch.bfloat16},
    ],
    ids=["compute", "compute, gradients float32", "gradients"],
)
@pytest.mark.parametrize("world_size", [2, 4])
@NAMES
def test_bf16(name: str, options: dict[str, Any], world_size: int) -> None:
    states = run_ranks(train_on_ranks, world_size, "transformer", options, sgd, 1, "", "cpu", name)
    assert_ranks_equal(states)
    assert {tensor.dtype for tensor in states[0].values()} == {torch.float32}
    expected = train_alone("transformer", STEPS, sgd)
    assert_close(states[0], expected, rtol=0.05, atol=0.02)  # bf16 has 8 bits
    assert any(not torch.allclose(states[0][k], v, rtol=1e-5, atol=1e-6) for k, v in expected.items())


def bf16_under_autocast(name: str) -> dict[str, str]:
    strategy = STRATEGIES[name](build("transformer"), Options(compute_dtype=torch.bfloat16))
    seen = {}
    for name, layer in strategy.module.named_modules():
        if strategy.shards().get(f"{name}.weight"):
            layer.register_forward_pre_hook(lambda m, i, n=name: seen.update({n: f"{m.weight.dtype}"}))
            layer.register_forward_hook(lambda m, i, o, n=name: seen.update({n: f"{seen[n]} {o.dtype}"}))
    with torch.autocast("cpu", torch.bfloat16):
        mean_loss(strategy, batch_of(0)).backward()
    strategy.finish_gradient_synchronization()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in strategy.parameters())
    return seen


@NAMES
def test_weights_are_in_the_compute_type_also_under_autocast(name: str) -> None:
    (seen, _) = run_ranks(bf16_under_autocast, 2, name)
    assert len(seen) == 23
    assert set(seen.values()) == {"torch.bfloat16 torch.bfloat16"}


# -- memory of shards --------------------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    module = build("awkward")
    optimizer = sgd(module.parameters())  # before wrapping: parameters stay the objects they were
    whole = {name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)}
    strategy = FSDP(module)
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in mine] == [id(p) for p in module.parameters()]
    mesh = init_device_mesh("cpu", (comm.world_size(),))
    memory: dict[int, int] = {}  # storage of the shards by address, and the bytes of their rows
    rows_bytes: dict[int, int] = {}
    for name, (shape, first) in strategy.shards().items():
        local = dict(module.named_parameters(remove_duplicate=False))[name].detach()
        memory[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        rows_bytes[local.data_ptr()] = local.nbytes
        assert torch.equal(local, whole[name][first : first + len(local)])
        stride = whole[name].stride()
        tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=shape, stride=stride, run_check=False)
        assert torch.equal(tensor.full_tensor(), whole[name])
    assert 0 <= sum(memory.values()) - sum(rows_bytes.values()) < ResizableBuffer.ALIGNMENT * len(rows_bytes)
    found = strategy.gather_full_params()
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor)
    assert list(strategy.full_state_dict()) == list(module.state_dict())
    named = dict(module.named_parameters(remove_duplicate=False))
    return {name: (first, len(named[name])) for name, (_, first) in strategy.shards().items()}


def test_shards_of_a_group_share_one_storage() -> None:
    groups = FSDP(build("transformer"))._groups
    assert max(len(group.params) for group in groups) > 1
    for group in groups:
        assert len({p.shard.untyped_storage().data_ptr() for p in group.params}) == 1


def test_shards_lie_as_torch_chunk_and_dtensor_have_them() -> None:
    places = run_ranks(describe, 4)
    assert "first.bias" not in places[0]
    for name, rows in {"first.weight": 7, "unused.weight": 3, "wide.weight": 40, "head.weight": 11}.items():
        pieces = [len(piece) for piece in torch.arange(rows).chunk(4)]
        pieces += [0] * (4 - len(pieces))
        assert [place[name] for place in places] == [(sum(pieces[:i]), n) for i, n in enumerate(pieces)]


class Recorder:
    """Records transfers and computation in order, and how many groups are unsharded at most."""

    def __init__(self, strategy: FSDP) -> None:
        self.events: list[str] = []
        self.most = 0
        self._groups = strategy._groups
        comm.start_gather = self._wrap(comm.start_gather)
        comm.start_scatter_mean = self._wrap(comm.start_scatter_mean)
        for gathered in strategy._gathered:
            record = partial(self._computes, gathered.name)
            gathered.module.register_forward_pre_hook(lambda *_, record=record: record("forward"))
            gathered.module.register_forward_hook(lambda m, i, output, record=record: self._watch(output, record))

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


def whole_bytes(strategy: FSDP) -> int:
    return sum(group.unsharded.nbytes for group in strategy._groups if group.unsharded.is_allocated())


def record_steps(reshard_after_forward: bool = True) -> tuple[int, list[str], list[str], list[str]]:
    strategy = FSDP(build("transformer"), reshard_after_forward=reshard_after_forward)
    recorder = Recorder(strategy)
    mean_loss(strategy, batch_of(0)).backward()
    assert whole_bytes(strategy) == 0
    strategy.finish_gradient_synchronization()
    first = recorder.take()
    mean_loss(strategy, batch_of(1)).backward()
    strategy.finish_gradient_synchronization()
    second = recorder.take()
    with torch.no_grad():
        mean_loss(strategy, batch_of(1))
    assert whole_bytes(strategy) == 0
    return recorder.most, first, second, recorder.take()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_group_is_prefetched_and_at_most_two_are_unsharded(world_size: int) -> None:
    most, first, second, evaluation = run_ranks(record_steps, world_size)[0]
    forward = [
        *("gather token_embeddings", "gather 0", "forward token_embeddings"),
        *("gather 1", "forward 0", "gather 2", "forward 1", "gather lm_head", "forward 2", "forward lm_head"),
    ]
    backward = [
        *("gather 2", "backward lm_head", "scatter lm_head", "gather 1", "backward 2", "scatter 2"),
        *("gather 0", "backward 1", "scatter 1", "backward 0", "scatter 0"),
        *("backward token_embeddings", "scatter token_embeddings"),
    ]
    assert first == second == forward + backward
    assert evaluation == forward
    assert most == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_stay_whole_for_backward_are_gathered_once(world_size: int) -> None:
    again = run_ranks(record_steps, world_size)[0]
    most, first, second, evaluation = run_ranks(record_steps, world_size, False)[0]
    at = again[1].index("forward lm_head") + 1
    forward, backward = again[1][:at], [event for event in again[1][at:] if not event.startswith("gather")]
    assert first == second == forward + backward
    assert evaluation == again[3]
    assert most == 4  # all but the embedding, which backward does not need


def learn() -> list[list[str]]:
    strategy = FSDP(build_blocks(in_order=False))
    recorder = Recorder(strategy)
    passes = []
    for step in range(2):
        strategy(inputs_of(0, step)).sum().backward()
        passes.append([e for e in recorder.take() if e.startswith("gather")])
        strategy.finish_gradient_synchronization()
    return passes


def test_the_order_is_learned_in_the_first_forward() -> None:
    (_, second), _ = run_ranks(learn, 2)
    there = ["gather inlet", *(f"gather blocks.{i}" for i in range(4)), "gather head"]
    # The last is kept for backward.
    assert second == [*there, *(f"gather blocks.{i}" for i in (3, 2, 1, 0)), "gather inlet"]


# -- whatever ranks use ------------------------------------------------------------------------------------------------


def some_loss(rank: int, use: tuple[int, ...], step: int, model: nn.Module) -> Tensor:
    x = inputs_of(rank, step).to(next(model.parameters()).device)
    return model(x, use).square().mean()


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
    uses: list[list[tuple[int, ...]]], in_order: bool = True, device: str = "cpu", reshard_after_forward: bool = True
) -> list[dict[str, Tensor | None]]:
    strategy = FSDP(build_blocks(in_order).to(device), reshard_after_forward=reshard_after_forward)
    found = []
    for step, use in enumerate(uses):
        strategy.zero_grad()
        some_loss(comm.rank(), use[comm.rank()], step, strategy).backward()
        strategy.finish_gradient_synchronization()
        assert whole_bytes(strategy) == 0
        found.append(gradients(strategy))
    return found


def check_uses(found: list[list[dict[str, Tensor | None]]], uses: list[list[tuple[int, ...]]]) -> None:
    for of_rank in found:
        for step, use in enumerate(uses):
            losses = [partial(some_loss, rank, u, step) for rank, u in enumerate(use)]
            assert_same_gradients(of_rank[step], expected_gradients(losses))


@pytest.mark.parametrize("first", range(len(USES)))
def test_ranks_may_use_different_weights(first: int) -> None:
    uses = USES[first:] + USES[:first]  # whichever comes first, when the order is learned
    check_uses(run_ranks(use_differently, 2, uses), uses)


def test_ranks_may_use_different_weights_once_the_order_is_learned() -> None:
    check_uses(run_ranks(use_differently, 2, USES, False), USES)


@pytest.mark.parametrize("in_order", [True, False])
def test_ranks_may_use_different_weights_that_stay_whole_for_backward(in_order: bool) -> None:
    check_uses(run_ranks(use_differently, 2, USES, in_order, "cpu", False), USES)


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
        assert whole_bytes(strategy) == 0
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
@pytest.mark.parametrize("on", [("1111", "1111"), ("1101", "1101"), ("1000", "1000"), ("1111", "1011")], ids=str)
def test_a_module_may_hand_its_inputs_on(on: tuple[str, str], reshard_after_forward: bool) -> None:
    steps = run_ranks(hand_on, 2, on, reshard_after_forward)
    for step in range(2):
        losses = [partial(handing_on_loss, rank, step, on[rank]) for rank in range(2)]
        expected = expected_gradients(losses, HandingOn)
        for found in steps:
            assert_same_gradients(found[step], expected)


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


def unused_keeps_gradient() -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
    strategy = FSDP(build_blocks())
    some_loss(comm.rank(), (0, 1), 0, strategy).backward()
    strategy.finish_gradient_synchronization()
    some_loss(comm.rank(), (2,), 1, strategy).backward()
    strategy.finish_gradient_synchronization()
    return gradients(strategy), {}


def test_a_gradient_of_an_earlier_step_stays() -> None:
    def both(rank: int, model: nn.Module) -> Tensor:
        return some_loss(rank, (0, 1), 0, model) + some_loss(rank, (2,), 1, model)

    expected = expected_gradients([partial(both, rank) for rank in range(2)])
    for found, _ in run_ranks(unused_keeps_gradient, 2):
        assert_same_gradients(found, expected)


# -- passes that do not end as usual -----------------------------------------------------------------------------------


class PlannedError(Exception):
    pass


def fail_once(*_: Any) -> None:
    raise PlannedError


def passes(kind: str, reshard_after_forward: bool) -> dict[str, Tensor | None]:
    strategy = FSDP(build_blocks(), reshard_after_forward=reshard_after_forward)
    rank = comm.rank()
    every = (0, 1, 2, 3)
    if kind == "after evaluation":
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                some_loss(rank, every, 5, strategy)
                some_loss(rank, (1,), 5, strategy)
                assert whole_bytes(strategy) == 0
    if kind == "after forward alone":
        losses = [some_loss(rank, every, 5, strategy) for _ in range(3)]
        kept = strategy._groups[-1:] if reshard_after_forward else strategy._groups
        assert whole_bytes(strategy) == sum(group.unsharded.nbytes for group in kept)
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
    assert whole_bytes(strategy) == 0
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


@pytest.mark.parametrize(
    "kind",
    [
        "after evaluation",
        "after forward alone",
        "after an error in forward",
        "after an error in backward",
        "two forwards, one backward",
        "two forwards, two backwards",
        "checkpointed outside",
        "the module itself",
    ],
)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_irregular_passes(kind: str, reshard_after_forward: bool) -> None:
    def both(rank: int, model: nn.Module) -> Tensor:
        return some_loss(rank, (0, 1, 2, 3), 0, model) + some_loss(rank, (0, 1, 2, 3), 1, model)

    expected = expected_gradients([partial(both, rank) for rank in range(2)])
    for found in run_ranks(passes, 2, kind, reshard_after_forward):
        assert_same_gradients(found, expected)


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


# -- frozen and shared weights -----------------------------------------------------------------------------------------


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


def train_adapted_simply() -> dict[str, Tensor]:
    torch.manual_seed(0)
    strategy = STRATEGIES["fsdp_simple"](Adapted(), Options())
    optimizer = adamw(strategy.parameters())
    for step in range(3):
        optimizer.zero_grad()
        adapted_loss(comm.rank(), step, strategy).backward()
        strategy.finish_gradient_synchronization()
        optimizer.step()
    return strategy.full_state_dict()


def train_adapted(reshard_after_forward: bool) -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    strategy = FSDP(Adapted(), reshard_after_forward=reshard_after_forward)
    recorder = Recorder(strategy)
    optimizer = adamw(strategy.parameters())
    for step in range(3):
        optimizer.zero_grad()
        recorder.take()
        adapted_loss(comm.rank(), step, strategy).backward()
        events = recorder.take()
        strategy.finish_gradient_synchronization()
        optimizer.step()
    return strategy.full_state_dict(), events


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_frozen_shared_and_repeated_weights(reshard_after_forward: bool) -> None:
    torch.manual_seed(0)
    model = Adapted()
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (sum(adapted_loss(rank, step, model) for rank in range(2)) / 2).backward()
        optimizer.step()
    for state in run_ranks(train_adapted_simply, 2):
        assert_close(state, model.state_dict(), **CLOSE)
    for state, events in run_ranks(train_adapted, 2, reshard_after_forward):
        assert_close(state, model.state_dict(), **CLOSE)
        # Forward only: backward does not come so far.
        assert [e for e in events if re.search(r"gather blocks.[01]$", e)] == ["gather blocks.0", "gather blocks.1"]


# -- norm, errors ------------------------------------------------------------------------------------------------------


def clip(name: str, max_norm: float) -> tuple[Tensor, dict[str, Tensor | None]]:
    strategy = STRATEGIES[name](build_blocks(), Options())
    some_loss(comm.rank(), (0, 1, 2), 0, strategy).backward()
    strategy.finish_gradient_synchronization()
    return strategy.clip_gradient(max_norm), gradients(strategy)


@pytest.mark.parametrize("max_norm", [0.1, float("inf")])
@NAMES
def test_clipping_is_by_the_norm_of_all_shards(name: str, max_norm: float) -> None:
    model = build_blocks()
    (sum(some_loss(rank, (0, 1, 2), 0, model) for rank in range(4)) / 4).backward()
    expected = clip_gradient(model.parameters(), max_norm)
    results = run_ranks(clip, 4, name, max_norm)
    assert len({norm.item() for norm, _ in results}) == 1
    torch.testing.assert_close(results[0][0], expected)
    assert_same_gradients(results[0][1], {name: p.grad for name, p in model.named_parameters()})


def test_embeddings_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight.*sparse=True"):
        FSDP(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(ValueError, match=r"^weight.*max_norm=1"):
        FSDP(nn.Embedding(3, 2, max_norm=1.0))


def test_nothing_to_shard_or_to_train() -> None:
    strategy = FSDP(nn.LayerNorm(3))
    strategy(torch.randn(2, 3)).sum().backward()
    strategy.finish_gradient_synchronization()
    frozen = FSDP(nn.Linear(3, 3).requires_grad_(False))
    frozen(torch.randn(2, 3, requires_grad=True)).sum().backward()
    frozen.finish_gradient_synchronization()
    assert frozen.module.weight.grad is None
    assert frozen.clip_gradient(1.0) == 0


# -- the same on GPUs --------------------------------------------------------------------------------------------------


@pytest.mark.multigpu
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("how", ["", "inductor", "checkpoint"])
@pytest.mark.parametrize("model", ["awkward", "transformer"])
def test_equals_one_process_nccl(model: str, how: str, reshard_after_forward: bool) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    args = (model, options, sgd, 2, how if model == "transformer" else "", "cuda")
    states = run_ranks(train_on_ranks, 2, *args, device="cuda", timeout_s=240)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone(model, STEPS, sgd), rtol=1e-3, atol=1e-4)


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


@pytest.mark.multigpu
def test_bf16_nccl() -> None:
    args = ("transformer", {"compute_dtype": torch.bfloat16}, sgd, 1, "", "cuda")
    states = run_ranks(train_on_ranks, 2, *args, device="cuda")
    assert_ranks_equal(states)
    assert_close(states[0], train_alone("transformer", STEPS, sgd), rtol=0.05, atol=0.02)


@pytest.mark.multigpu
def test_ranks_may_use_different_weights_nccl() -> None:
    check_uses(run_ranks(use_differently, 2, USES, True, "cuda", device="cuda"), USES)


def memory_of_a_step(reshard_after_forward: bool) -> tuple[float, float]:
    """Memory in the last step, in groups: between the passes, and at the peak without the shards' gradients."""
    device = torch.device("cuda", comm.rank())
    with device:
        strategy = FSDP(TransformerLM(64, 16, d_model=1024, num_layers=24, num_heads=16, d_ff=4096), torch.bfloat16,
                        reshard_after_forward=reshard_after_forward)  # fmt: skip
    tokens = torch.zeros(1, 17, dtype=torch.int64, device=device)
    for _ in range(6):  # fast steps, in which unreleased memory adds up
        strategy.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = mean_loss(strategy, tokens)
        between = torch.cuda.memory_allocated() - before
        loss.backward()
        strategy.finish_gradient_synchronization()
        torch.cuda.synchronize()
    kept = sum(p.grad.nbytes for p in strategy.parameters() if p.grad is not None)
    group = max(group.unsharded.nbytes for group in strategy._groups)
    return between / group, (torch.cuda.max_memory_allocated() - before - kept) / group


@pytest.mark.multigpu
def test_memory_is_that_of_a_few_groups_nccl() -> None:
    for between, at_most in run_ranks(memory_of_a_step, 2, True, device="cuda"):
        assert between < 4
        assert at_most < 8  # two groups, gradients of two, send buffers, cuBLAS; all would be 24


@pytest.mark.multigpu
def test_memory_is_that_of_all_groups_between_the_passes_if_they_stay_unsharded_nccl() -> None:
    for between, at_most in run_ranks(memory_of_a_step, 2, False, device="cuda"):
        assert 24 <= between < 24 + 4
        assert at_most < 8  # a group is freed before its shards' gradients come


def test_a_cast_or_a_move_after_wrapping_is_refused_unless_it_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    strategy = FSDP(module)
    before = [p.data_ptr() for p in module.parameters()]
    strategy.to("cpu").float()
    assert [p.data_ptr() for p in module.parameters()] == before
    with pytest.raises(
        ValueError, match=r"^0\.weight would become torch\.bfloat16 on cpu from torch\.float32 on cpu: "
    ):
        strategy.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"^0\.weight would become torch\.float32 on meta"):
        strategy.to("meta")
    assert module[0].weight.dtype == torch.float32
