"""Broadcast buckets of the sharded optimizer: transfers, and the memory of the parameters."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import comm
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.torch_peers import TorchFSDP
from cs336_systems.parallel.zero1 import ShardedOptimizer
from tests.distributed import run_ranks
from tests.parallel.models import batch_of, build, for_each, mean_loss, message_of
from tests.parallel.test_zero1 import SETUPS, SMALL, STEPS, Training, alone, check, equal

# Transfers


@contextmanager
def record_events(optimizer: ShardedOptimizer) -> Iterator[list[tuple[Any, ...]]]:
    events: list[tuple[Any, ...]] = []
    assert optimizer._local is not None
    step, start = optimizer._local.step, comm.start_broadcasts

    def record_step() -> None:
        events.append(("step",))
        step()

    def record_start(sources: Any, what: str) -> comm.Transfer:
        transfer = start(sources, what)
        wait = transfer.wait
        sizes = [0] * comm.world_size()
        for tensor, owner in sources:
            sizes[owner] += tensor.nbytes
        events.append(("start", sizes, len(sources)))

        def record_wait() -> None:
            events.append(("wait",))
            wait()

        transfer.wait = record_wait  # type: ignore[method-assign]
        return transfer

    optimizer._local.step, comm.start_broadcasts = record_step, record_start  # type: ignore[method-assign, assignment]
    try:
        yield events
    finally:
        comm.start_broadcasts = start


def events_of_a_step(count: int, bucket_size_mb: float, uses: bool) -> list[tuple[Any, ...]]:
    """With parameters of 1 KiB; where `uses` is false, rank 1 has no gradients."""
    parameters = [nn.Parameter(torch.zeros(256)) for _ in range(count)]
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1, bucket_size_mb=bucket_size_mb)
    for p in parameters if uses or comm.rank() != 1 else []:
        p.grad = torch.ones_like(p)
    with record_events(optimizer) as events:
        optimizer.step()
    return events


def test_parameters_travel_in_few_transfers_while_the_next_are_stepped() -> None:
    kib = 1024
    for events in run_ranks(events_of_a_step, 2, 12, 2 / kib, True):
        start = ("start", [2 * kib, 2 * kib], 2)  # both ranks send
        assert events == [("step",), start] * 3 + [("wait",)] * 3
    for events in run_ranks(events_of_a_step, 2, 12, 256, True):
        assert events == [("step",), ("start", [6 * kib, 6 * kib], 2), ("wait",)]
    # A parameter above the limit goes alone.
    for events in run_ranks(events_of_a_step, 2, 4, 0.5 / kib, True):
        assert [event[0] for event in events] == ["step", "start"] * 2 + ["wait"] * 2


def test_transfers_are_the_same_whatever_gradients_a_rank_has() -> None:
    with_them, without = run_ranks(events_of_a_step, 2, 7, 1 / 1024, False)
    assert [e for e in with_them if e[0] == "start"] == [e for e in without if e[0] == "start"]


def step_with_only_own_gradients() -> tuple[list[Tensor], int]:
    """Others' gradients are not needed for the step, as a strategy of its own may find of use."""
    training = Training(SETUPS["AdamW"], True)
    assert isinstance(training.optimizer, ShardedOptimizer)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        training.draw_gradients(step)
        for p in training.model.parameters():
            if training.optimizer.owner_of(p) != comm.rank():
                p.grad = None
        training.optimizer.step()
    return training.result()


def test_a_step_needs_gradients_of_own_parameters_only() -> None:
    check(run_ranks(step_with_only_own_gradients, 3), alone("AdamW"))


# Memory of parameters


def pieces_of(parameters: list[Tensor]) -> list[int]:
    """The storage of each, numbered in the order of their first appearance; each begins at a multiple of 512 bytes."""
    storages = [p.untyped_storage().data_ptr() for p in parameters]
    assert not any(p.storage_offset() * p.itemsize % 512 for p in parameters)
    return [list(dict.fromkeys(storages)).index(storage) for storage in storages]


def places(bucket_size_mb: float) -> tuple[list[int], list[int], list[list[Any]], bool]:
    """Pieces at first, pieces after some have been added and thawed, transfers of a step, whether the first stayed."""
    torch.manual_seed(0)
    first: list[Tensor] = [nn.Parameter(torch.randn(100, 3)) for _ in range(6)]
    first += [nn.Parameter(torch.randn(5, dtype=torch.double)) for _ in range(2)]
    frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    values = [p.detach().clone() for p in first]
    optimizer = ShardedOptimizer([*first, frozen], torch.optim.SGD, lr=0.1, bucket_size_mb=bucket_size_mb)
    assert equal([p.detach() for p in first], values)
    before, addresses = pieces_of(first), [p.data_ptr() for p in first]

    later = [nn.Parameter(torch.randn(7)) for _ in range(3)]
    optimizer.add_param_group({"params": later})
    frozen.requires_grad_()
    for p in (*first, *later):
        p.grad = torch.ones_like(p)
    with record_events(optimizer) as events:
        optimizer.step()
    everything = [*first, *later, frozen]
    stayed = addresses == [p.data_ptr() for p in first]
    return before, pieces_of(everything), [e[1:] for e in events if e[0] == "start"], stayed  # type: ignore[misc]


def test_a_share_of_a_bucket_is_one_tensor_and_is_not_moved() -> None:
    """300 floats take a place of 1536 bytes, few numbers one of 512."""
    both = run_ranks(places, 2, 1)
    assert both[0] == both[1]
    pieces, more, transfers, stayed = both[0]
    # One an owner and dtype; the owners take turns.
    assert pieces == [0, 1, 0, 1, 0, 1, 2, 3]
    floats, doubles = 3 * 1536, 512
    assert transfers[0] == ([floats + doubles] * 2, 4)
    # Added and thawed parameters have buckets of their own.
    assert (more[:8], len(set(more[8:]) - set(pieces)), len(transfers)) == (pieces, 3, 3)
    assert [sum(sizes) for sizes, _ in transfers[1:]] == [3 * 512, 512]
    assert stayed

    pieces, _, transfers, stayed = run_ranks(places, 2, 4096 / 2**20)[0]
    # Two matrices in 4096 bytes, and a third would be beyond; then the third and a double.
    assert pieces == [0, 1, 0, 1, 2, 3, 4, 5]
    assert [sizes for sizes, _ in transfers[:2]] == [[2 * 1536] * 2, [1536 + 512] * 2]
    assert stayed


def lies_where_it_lay() -> bool:
    model = build("awkward")
    addresses = [p.data_ptr() for p in model.parameters()]
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    mean_loss(model, batch_of(0)).backward()
    optimizer.step()
    return addresses == [p.data_ptr() for p in model.parameters()]


def test_one_rank_moves_nothing() -> None:
    assert run_ranks(lies_where_it_lay, 1) == [True]


def with_a_view(on: list[int]) -> tuple[list[float], list[float], list[Any]]:
    """A parameter that is a view of a larger storage on some ranks; the storage gets the update."""
    larger, free = torch.zeros(10), [nn.Parameter(torch.zeros(n)) for n in (4, 0, 4)]
    view = nn.Parameter(larger[2:6] if comm.rank() in on else torch.zeros(4))
    optimizer = ShardedOptimizer([free[0], view, *free[1:]], torch.optim.SGD, lr=1.0)
    for p in (*free, view):
        p.grad = torch.full_like(p, -3.0)
    with record_events(optimizer) as events:
        optimizer.step()
    return larger.tolist(), torch.cat([view, *free]).tolist(), [e for e in events if e[0] == "start"]


@pytest.mark.parametrize("on", [[0, 1], [1]])
def test_a_view_of_a_larger_storage_is_not_moved(on: list[int]) -> None:
    results = run_ranks(with_a_view, 2, on)
    for rank, (larger, values, transfers) in enumerate(results):
        assert larger == ([0.0] * 2 + [3.0] * 4 + [0.0] * 4 if rank in on else [0.0] * 10)
        assert values == [3.0] * 12
        # Rank 1 has the view alone, 16 bytes; rank 0 two slots of 512. Empty tensors are passed too, but not sent.
        assert transfers == [("start", [1024, 16], 3)]


def step_with_other_memory(change: str) -> str:
    first, second = (nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    if change == "a view moves":
        first.data = torch.zeros(4, 3)[:2]
    optimizer = ShardedOptimizer([first, second], torch.optim.SGD, lr=0.1)
    if change == "two trade places":
        first.data, second.data = second.data, first.data
    elif change == "another dtype":
        first.data = first.data.half()
    else:
        first.data = torch.zeros(2, 3)
    return message_of(optimizer.step)


def test_refuses_parameters_whose_memory_was_replaced() -> None:
    changes = ["one moves", "a view moves", "two trade places", "another dtype"]
    for of_rank in run_ranks(for_each, 2, changes, step_with_other_memory):
        for change, said in of_rank.items():
            assert said.startswith("ValueError: the memory of a parameter of shape (2, 3) was replaced"), change
    (of_one,) = run_ranks(for_each, 1, changes, step_with_other_memory)
    assert of_one == dict.fromkeys(changes, "nothing was raised")


def of_shards(name: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    strategy = {"fsdp": FSDP, "torch_fsdp": TorchFSDP}[name](model)
    return message_of(lambda: ShardedOptimizer(strategy.parameters(), torch.optim.SGD, lr=0.1))


@pytest.mark.parametrize("name", ["fsdp", "torch_fsdp"])
def test_refuses_parameters_that_are_sharded_already(name: str) -> None:
    for said in run_ranks(of_shards, 2, name):
        assert "this rank's part of a sharded one" in said


def trained(compiled: bool, sharded: bool) -> dict[str, Tensor]:
    """A model that was compiled, had run, and had gradients' hooks before its parameters were moved."""
    model = build("transformer")
    run = torch.compile(model, backend="eager") if compiled else model
    mean_loss(run, batch_of(9)).backward()
    model.zero_grad()
    came = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: came.append(p.data_ptr()))
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    if sharded:
        make = functools.partial(ShardedOptimizer, optimizer_cls=torch.optim.AdamW, bucket_size_mb=SMALL)
    optimizer = make(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(run, batch_of(step)).backward()
        optimizer.step()
    assert sorted(came) == sorted(3 * [p.data_ptr() for p in model.parameters()])
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_model_that_was_compiled_before_trains_on() -> None:
    expected = run_ranks(trained, 1, False, False)[0]
    assert all(equal(parameters, expected) for parameters in run_ranks(trained, 2, True, True))
