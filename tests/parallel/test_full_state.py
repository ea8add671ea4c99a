"""The full state dict of a model that is spread over ranks: its content, who has it, and the memory it takes."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cs336_systems.parallel import STRATEGIES, Options, comm
from tests.distributed import run_ranks, wait_until
from tests.parallel.models import build


def gather_to(to_ranks: Sequence[int | None], name: str, model: str, device: str) -> list[Any]:
    strategy = STRATEGIES[name](build(model).to(device), Options())
    states = [strategy.full_state_dict(to_rank=rank) for rank in to_ranks]
    return [({key: t.cpu() for key, t in s.items()}, {t.device.type for t in s.values()}) for s in states]


def check_gathered(to_ranks: Sequence[int | None], world_size: int, name: str, model: str, device: str) -> None:
    expected = build(model).state_dict()
    for other, results in enumerate(run_ranks(gather_to, world_size, to_ranks, name, model, device, device=device)):
        for rank, (state, devices) in zip(to_ranks, results, strict=True):
            if rank not in (None, other):
                assert state == {}
                continue
            assert devices == {"cpu" if other == rank else device}
            assert list(state) == list(expected)
            assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize(
    "name, model",
    [
        ("bucketed", "awkward"),
        ("fsdp", "awkward"),
        ("fsdp", "transformer"),
        ("fsdp_simple", "awkward"),
        ("torch_fsdp", "transformer"),
    ],
)
def test_one_rank_has_the_whole_state_or_all_have(name: str, model: str) -> None:
    check_gathered((None, 0, 2), 3, name, model, "cpu")


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ["bucketed", "fsdp", "torch_fsdp"])
def test_one_rank_has_the_whole_state_in_main_memory(name: str) -> None:
    check_gathered((None, 0, 1), 2, name, "transformer", "cuda")


def change_what_was_gathered(name: str) -> bool:
    """Whether the model is as it was after its gathered state has been written to."""
    module = build("transformer")
    strategy = STRATEGIES[name](module, Options())
    before = [p.detach().clone() for p in module.parameters()]
    for tensor in strategy.full_state_dict(to_rank=0).values():
        tensor.fill_(7)
    return all(torch.equal(p.detach(), old) for p, old in zip(module.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["bucketed", "fsdp", "fsdp_simple"])
def test_the_state_that_one_rank_gathers_is_a_copy(name: str) -> None:
    assert run_ranks(change_what_was_gathered, 2, name) == [True, True]


def tied_and_gathered() -> bool:
    state = STRATEGIES["fsdp"](build("awkward"), Options()).full_state_dict(to_rank=0)
    return not state or state["embedding.weight"] is state["head.weight"]


def test_a_tied_weight_is_gathered_once() -> None:
    assert run_ranks(tied_and_gathered, 2) == [True, True]


def whole_at_a_time(to_rank: int | None) -> tuple[int, int, int]:
    """Bytes of whole weights: at most at a time, of all weights, and of the largest parameter group."""
    strategy = STRATEGIES["fsdp"](build("transformer"), Options())
    start, rooms, sizes, most = comm.start_all_gather, [], [], 0

    def watching(outputs: Any, inputs: Any, what: str) -> Any:
        nonlocal most
        if to_rank is not None:
            wait_until(lambda: not alive(), timeout_s=10)  # gloo's thread frees its input a moment after it is done
        sizes.append(sum(t.nbytes for t in outputs))
        rooms.extend((weakref.ref(t.untyped_storage()), t.nbytes) for t in outputs)
        most = max(most, alive())
        return start(outputs, inputs, what)

    def alive() -> int:
        return sum(nbytes for storage, nbytes in rooms if storage() is not None)

    comm.start_all_gather = watching
    state = strategy.full_state_dict(to_rank=to_rank)
    del state
    return most, sum(sizes), max(sizes)


def test_a_rank_that_gathers_for_another_has_one_group_whole_at_a_time() -> None:
    for most, _, largest in run_ranks(whole_at_a_time, 2, 0):
        assert most == largest
    for most, everything, _ in run_ranks(whole_at_a_time, 2, None):
        assert most == everything
