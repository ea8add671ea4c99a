"""The contract of strategies: refusals, values that ranks share, and state that remains afterwards."""

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.parallel import STRATEGIES, Options, comm, get_strategy
from cs336_systems.parallel.bucketed import DDPBucketed
from cs336_systems.parallel.ddp import DDP, FlatDDP
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.ranks import alone
from cs336_systems.parallel.zero1 import ShardedOptimizer
from cs336_systems.training.optimizer import FusedAdamW
from tests.distributed import run_ranks, wait_until
from tests.parallel.models import adamw, build, for_each, message_of, part_of, train_step
from tests.parallel.test_ddp import FSDPS


def wrapped(name: str, module: nn.Module, **options: Any) -> Any:
    return get_strategy(name)(module, Options(**options))


# Refused


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("cls", [DDP, DDPBucketed])
def test_a_bucket_size_that_is_not_positive_and_finite_is_refused(cls: type[DDP], size: float) -> None:
    with pytest.raises(ValueError, match="bucket_size_mb is"):
        cls(nn.Linear(2, 2), bucket_size_mb=size)


def two_backward_passes(name: str, second_in_no_sync: bool) -> str:
    strategy = wrapped(name, nn.Linear(2, 2))
    strategy(torch.ones(1, 2)).sum().backward()

    def second() -> None:
        with strategy.no_sync() if second_in_no_sync else contextlib.nullcontext():
            strategy(torch.ones(1, 2)).sum().backward()

    said = message_of(second)
    strategy.finish_gradient_synchronization()
    return said


@pytest.mark.parametrize("second_in_no_sync", [False, True])
@pytest.mark.parametrize("name", ["overlap", "bucketed"])
def test_a_backward_pass_after_a_synchronizing_one_is_refused(name: str, second_in_no_sync: bool) -> None:
    for said in run_ranks(two_backward_passes, 2, name, second_in_no_sync):
        assert re.search(r"reached (weight|bias) before finish_gradient_synchronization: .* inside no_sync", said)


def step_on_sparse(name: str) -> str:
    strategy = get_strategy(name)(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)), Options())

    def step() -> None:
        strategy(torch.tensor([1, 2])).sum().backward()
        strategy.finish_gradient_synchronization()

    return message_of(step)


def test_sparse_gradients_are_refused() -> None:
    for of_rank in run_ranks(for_each, 2, ["naive", "flat", "individual", "overlap", "bucketed"], step_on_sparse):
        for name, message in of_rank.items():
            assert re.match("ValueError: .*gradient.*: a tensor is torch.sparse_coo: ", message), name


def test_complex_gradients_do_not_travel_in_a_real_type() -> None:
    module = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(ValueError, match=r"^grad_dtype is torch.bfloat16: it must be None, for weight is torch.compl"):
        DDP(module, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.int8, "bf16", torch.float8_e5m2, torch.complex64, int])
def test_gradients_travel_in_floating_point(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"^grad_dtype is .*: it must be one of None, torch.float64"):
        FlatDDP(nn.Linear(2, 2), dtype)
    with pytest.raises(ValueError, match=r"^compute_dtype is "):
        FSDP(nn.Linear(2, 2), dtype)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("cls", [DDP, DDPBucketed, FSDP])
def test_a_strategy_is_not_copied(cls: type[Any], copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"^a {cls.__name__} cannot be copied or pickled"):
        copied(cls(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"^a ShardedOptimizer cannot be copied or pickled"):
        copied(ShardedOptimizer(nn.Linear(2, 2).parameters(), torch.optim.AdamW))
    with pytest.raises(TypeError, match=r"^a FusedAdamW cannot be copied or pickled"):
        copied(FusedAdamW(nn.Linear(2, 2).parameters(), factor=torch.ones(()), masters={}))


def refused() -> dict[str, str]:
    def linear() -> nn.Linear:
        return nn.Linear(2, 4, bias=False)

    rank = comm.rank()
    names = ("a", "b") if rank == 0 else ("b", "a")
    expanded = nn.Module()
    expanded.register_buffer("mask", torch.ones(1).expand(3) if rank == 0 else torch.ones(3))
    sharded = nn.Sequential(linear())
    assert wrapped("fsdp", sharded).full_state_dict()["0.weight"].shape == (4, 2)
    calls = {
        "shape": lambda: wrapped("naive", nn.Linear(2, 2 + rank)),
        "frozen": lambda: wrapped("overlap", nn.Linear(2, 3).requires_grad_(rank == 0)),
        "order": lambda: wrapped("naive", nn.ModuleDict({name: linear() for name in names})),
        "expanded": lambda: wrapped("naive", expanded),
        "nested": lambda: wrapped("overlap", nn.Sequential(linear(), wrapped("naive", linear()))),
        "sharded": lambda: wrapped("bucketed", sharded),
        "bf16 by torch_ddp": lambda: wrapped("torch_ddp", linear(), grad_dtype=torch.bfloat16),
    }
    return {name: message_of(call) for name, call in calls.items()}


def test_modules_that_differ_or_are_wrapped_already_are_refused() -> None:
    for found in run_ranks(refused, 2):
        differ = "the ranks have different parameters"
        assert f"{differ}: weight is float32 (3, 2) on rank 1 and float32 (2, 2) on rank 0" in found["shape"]
        assert f"{differ}: weight is frozen float32 (3, 2) on rank 1 and float32 (3, 2) on rank 0" in found["frozen"]
        assert f"{differ}: number 0 is b.weight on rank 1 and a.weight on rank 0" in found["order"]
        assert "mask is float32 (3,) on rank 1 and float32 (3,), expanded along 0 on rank 0" in found["expanded"]
        assert found["nested"].startswith("ValueError: module is a Sequential: its 1 is a NaiveDDP")
        assert found["sharded"].startswith("ValueError: 0.weight is this rank's part of a sharded parameter")
        assert found["bf16 by torch_ddp"].startswith("ValueError: parallel.grad_dtype is bf16: it must be same, ")


def changed_after_wrapping(name: str, trains: bool) -> str:
    module = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    module[0].requires_grad_(trains)
    strategy = wrapped(name, module)
    module[0].requires_grad_(not trains)
    strategy(torch.ones(1, 2)).sum().backward()
    return message_of(strategy.finish_gradient_synchronization)


@pytest.mark.parametrize(
    "name, trains, was",
    [
        ("overlap", False, "frozen when its module was wrapped and is not now"),
        ("bucketed", False, "frozen when its module was wrapped and is not now"),
        ("fsdp", False, "frozen when its module was wrapped and is not now"),
        ("fsdp", True, "trainable when its module was wrapped and is frozen now"),
    ],
)
def test_freezing_or_thawing_after_wrapping_is_refused(name: str, trains: bool, was: str) -> None:
    for said in run_ranks(changed_after_wrapping, 2, name, trains):
        assert said.startswith(f"ValueError: 0.weight was {was}")


# Shared by the ranks


def test_acting_alone_ends_with_its_context() -> None:
    assert run_ranks(world_sizes_when_alone, 2) == 2 * [[1, 1, 2]]


def world_sizes_when_alone() -> list[int]:
    sizes = []
    with alone():
        with alone():
            sizes.append(comm.world_size())
        sizes.append(comm.world_size())
    return [*sizes, comm.world_size()]


def lies_otherwise(device: str) -> dict[str, Any]:
    """Tensors that are part of a larger one, transposed on rank 0 alone, or expanded; and the memory beside them."""
    rank, room = comm.rank(), (torch.arange(24.0).view(4, 6) + 100 * comm.rank()).to(device)
    module = nn.Module()
    module.columns = nn.Parameter(room[:, :2])
    module.register_buffer("transposed", (torch.arange(6.0, device=device).view(2, 3) + 10 * rank).t())
    if rank == 1:
        module.transposed = module.transposed.contiguous()
    module.register_buffer("mask", torch.full((1, 3), float(rank), device=device).expand(10_000, 3))
    strategy = wrapped("naive", module)
    values = {name: tensor.to("cpu", copy=True) for name, tensor in strategy.full_state_dict().items()}
    return {**values, "beside": room[:, 2:].cpu(), "mask stride": module.mask.stride(0)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_tensors_of_any_memory_layout_get_rank_0s_values(device: str) -> None:
    first, other = run_ranks(lies_otherwise, 2, device, device=device)
    for name in ("columns", "transposed", "mask"):
        assert torch.equal(first[name], other[name])
    assert torch.equal(other["columns"], torch.arange(24.0).view(4, 6)[:, :2])
    assert torch.equal(other["transposed"], torch.arange(6.0).view(2, 3).t())
    assert torch.equal(other["mask"], torch.zeros(10_000, 3))
    assert torch.equal(other["beside"], torch.arange(24.0).view(4, 6)[:, 2:] + 100)
    assert other["mask stride"] == 0


# Afterwards


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def extra_state(name: str) -> Any:
    strategy = wrapped(name, nn.Sequential(WithExtraState(2, 2)))
    return strategy.full_state_dict(to_rank=1).get("0._extra_state"), len(strategy.full_state_dict())


@pytest.mark.parametrize("name", ["naive", *FSDPS])
def test_extra_state_of_a_module_is_in_its_full_state_dict(name: str) -> None:
    assert run_ranks(extra_state, 2, name) == [(None, 3), ({"version": 1}, 3)]


DISTINCT = [*{make: name for name, make in reversed(STRATEGIES.items())}.values()]  # each under its first name


def train_and_drop(name: str) -> None:
    module = build("transformer")
    strategy = STRATEGIES[name](module, Options())
    optimizer = adamw(strategy.parameters())
    for step in range(2):
        train_step(strategy, optimizer, part_of(step))
    first = next(strategy.parameters())
    weak = [weakref.ref(thing) for thing in (module, strategy, first, first.grad)]
    del module, strategy, optimizer, first

    def all_gone() -> bool:
        gc.collect()
        return [reference() for reference in weak] == [None] * 4

    wait_until(all_gone, timeout_s=10)  # gloo's thread frees its input a moment after the transfer is done


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trained_model_is_freed_with_its_strategy(world_size: int) -> None:
    run_ranks(for_each, world_size, DISTINCT, train_and_drop)
