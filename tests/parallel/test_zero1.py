"""The sharded optimizers on gloo: equal to the plain optimizer in one process bit for bit, with a part of its state."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from cs336_basics.optimizer import AdamW
from cs336_systems.parallel import comm
from cs336_systems.parallel.zero1 import ShardedOptimizer
from cs336_systems.parallel.zero1_simple import SimpleShardedOptimizer
from tests.distributed import run_ranks
from tests.parallel.models import build

STEPS = 4
SMALL = 0.002  # four parameters at most, so that there are many buckets
Kind = bool | str
"""False: the plain optimizer. True: ShardedOptimizer. "simple": SimpleShardedOptimizer."""
KINDS = pytest.mark.parametrize("kind", [True, "simple"], ids=["fast", "simple"])
WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])


@dataclass(frozen=True)
class Setup:
    """How to train the awkward model: tied, frozen and unused parameters, two dtypes."""

    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    kwargs: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    groups: bool = False
    scheduler: bool = False
    closure: bool = False
    scaler: bool = False
    missing: bool = False  # gradients, of other parameters at each step
    added: bool = False  # parameters, midway
    thawed: bool = False  # the frozen parameter, midway


EVERYTHING: dict[str, Any] = dict(groups=True, closure=True, missing=True, added=True, thawed=True)
SETUPS = {
    "own AdamW": Setup(AdamW),
    "AdamW": Setup(),
    "fused AdamW": Setup(kwargs={"lr": 1e-2, "fused": True}),
    "amsgrad": Setup(kwargs={"lr": 1e-2, "amsgrad": True}),
    "SGD": Setup(torch.optim.SGD),
    "SGD momentum": Setup(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Adagrad": Setup(torch.optim.Adagrad),  # has its state from the beginning
    "groups": Setup(groups=True),
    "scheduler": Setup(groups=True, scheduler=True),
    "scaler": Setup(scaler=True),
    "missing": Setup(missing=True),
    "everything, own AdamW": Setup(AdamW, **EVERYTHING),
    "everything, fused AdamW": Setup(kwargs={"lr": 1e-2, "fused": True}, **EVERYTHING),
    "everything, SGD momentum": Setup(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}, **EVERYTHING),
}


class Training:
    """A model, its optimizer, and gradients drawn for each step, the same on all ranks and devices."""

    def __init__(self, setup: Setup, sharded: Kind, device: str = "cpu") -> None:
        self.setup, self.device = setup, device
        self.model = build("awkward").to(device)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.later: list[nn.Parameter] = []
        if setup.added:
            self.later, vectors = [matrices.pop(), *vectors[-2:]], vectors[:-2]
        # As a list of all, or with a rate and a decay for each.
        params: Any = [*matrices, *vectors]
        if setup.groups:
            params = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-2}]
        make: Callable[..., torch.optim.Optimizer] = setup.cls
        if sharded == "simple":
            make = functools.partial(SimpleShardedOptimizer, optimizer_cls=setup.cls)
        elif sharded:
            make = functools.partial(ShardedOptimizer, optimizer_cls=setup.cls, bucket_size_mb=SMALL)
        self.optimizer = make(params, **setup.kwargs)
        self.scheduler = None
        if setup.scheduler:
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, max_lr=[0.1, 0.05], total_steps=STEPS + 1, cycle_momentum=False
            )
        self.scaler = torch.amp.GradScaler(device, enabled=setup.scaler, init_scale=1.0)

    def steps(self, first: int = 0, last: int = STEPS) -> None:
        for step in range(first, last):
            if step == STEPS // 2:
                if self.later:
                    self.optimizer.add_param_group({"params": self.later, "lr": 2e-2})
                if self.setup.thawed:
                    self.model.frozen.weight.requires_grad = True
            self.optimizer.zero_grad()
            self.one_step(step)
            if self.scheduler is not None:
                self.scheduler.step()

    def one_step(self, step: int) -> None:
        if self.setup.closure:
            calls = []

            def closure() -> Tensor:
                assert torch.is_grad_enabled()
                calls.append(step)
                self.draw_gradients(step)
                return torch.tensor(float(step))

            assert self.optimizer.step(closure) == step
            assert calls == [step]
            return
        self.draw_gradients(step)
        if self.setup.scaler:
            # The first call of scale creates the scale.
            self.scaler.scale(torch.ones((), device=self.device))
            if step == 1:
                next(self.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            self.scaler.step(self.optimizer)
            self.scaler.update(1.0)
        else:
            assert self.optimizer.step() is None

    def draw_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for i, (name, p) in enumerate(self.model.named_parameters()):
            gradient = torch.randn(p.shape, generator=generator)
            left_out = name.startswith("unused") or (self.setup.missing and i % 3 == step % 3)
            if p.requires_grad and not left_out:
                p.grad = gradient.to(p)

    def load(self, result: dict[str, Any]) -> None:
        self.model.load_state_dict(result["parameters"], strict=False)  # which has no buffer, nor tied names
        self.optimizer.load_state_dict(result["optimizer"])

    def result(self) -> dict[str, Any]:
        parameters = {name: p.detach().cpu() for name, p in self.model.named_parameters()}
        return {"parameters": parameters, "optimizer": full_state_dict(self.optimizer)}


def full_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """On rank 0 the state dict that one process would have, put together from the parts of all ranks."""
    full = optimizer.state_dict()
    parts = comm.all_gather_objects(tree_map_only(Tensor, Tensor.cpu, full["state"]), "test")
    merged = {i: state for part in parts for i, state in part.items()}
    assert len(merged) == sum(map(len, parts))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    full["state"] = {i: merged[i] for i in sorted(merged) if parameters[i].requires_grad}  # Adagrad has others too
    return full if comm.rank() == 0 else None


def train_all(sharded: Kind, device: str) -> dict[str, dict[str, Any]]:
    """The results of all setups, which take no longer than starting the ranks does."""
    results = {}
    for name, setup in SETUPS.items():
        training = Training(setup, sharded, device)
        training.steps()
        results[name] = training.result()
    return results


@functools.cache
def on_gpus() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_all, 2, True, "cuda", device="cuda")


@functools.cache
def _all_alone(device: str) -> dict[str, dict[str, Any]]:
    return run_ranks(train_all, 1, False, device, device=device)[0]


def alone(name: str, device: str = "cpu") -> dict[str, Any]:
    """The result of the plain optimizer in one process."""
    return _all_alone(device)[name]


def equal(a: Any, b: Any) -> bool:
    """Whether two structures are the same, tensors to the last bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return a == b


def check(results: list[dict[str, Any]], expected: dict[str, Any], setup: str = "") -> None:
    for rank, result in enumerate(results):
        for name, parameter in expected["parameters"].items():
            assert torch.equal(result["parameters"][name], parameter), f"{setup}: {name} on rank {rank}"
        assert rank == 0 or result["optimizer"] is None
    assert equal(results[0]["optimizer"], expected["optimizer"]), setup


@WORLD_SIZES
@KINDS
def test_equals_the_plain_optimizer(kind: Kind, world_size: int) -> None:
    ranks = run_ranks(train_all, world_size, kind, "cpu")
    for name in SETUPS:
        check([results[name] for results in ranks], alone(name), name)


# Owners


def shapes_of_states() -> tuple[list[int], int, dict[int, int], list[int | None]]:
    training = Training(SETUPS["groups"], True)
    training.steps(0, 2)
    optimizer = training.optimizer
    assert isinstance(optimizer, ShardedOptimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = {i: optimizer.state[p] for i, p in enumerate(parameters) if optimizer.state.get(p, {})}
    assert optimizer.state_dict()["state"].keys() == own.keys()
    owners = [optimizer.owner_of(p) for p in parameters]
    large = {i: sum(v.nbytes for v in state.values() if v.ndim) for i, state in own.items()}
    everything = sum(v.nbytes for state in own.values() for v in state.values())
    return sorted(own), everything, large, owners


@WORLD_SIZES
def test_state_is_spread_evenly_and_nothing_is_held_twice(world_size: int) -> None:
    """With AdamW: 8 bytes for one element of float32, and the count of steps."""
    ranks = run_ranks(shapes_of_states, world_size)
    states = alone("groups")["optimizer"]["state"]
    assert sorted(i for own, *_ in ranks for i in own) == sorted(states)
    assert sum(total for _, total, _, _ in ranks) == sum(v.nbytes for state in states.values() for v in state.values())

    sizes = [sum(large.values()) for _, _, large, _ in ranks]
    largest = max(size for _, _, large, _ in ranks for size in large.values())
    assert max(sizes) - min(sizes) <= largest

    for rank, (own, _, _, owners) in enumerate(ranks):
        assert owners == ranks[0][3]
        assert all(owners[i] == rank for i in own)
    parameters = list(build("awkward").parameters())
    assert ranks[0][3].count(None) == sum(not p.requires_grad for p in parameters) == 1


def elements_of_ranks(sizes: list[int], later: list[int]) -> tuple[list[int], bool]:
    first, second = ([nn.Parameter(torch.zeros(n)) for n in some] for some in (sizes, later))
    optimizer = ShardedOptimizer(first, torch.optim.SGD, lr=0.1)
    before = [optimizer.owner_of(p) for p in first]
    if second:
        optimizer.add_param_group({"params": second})
    elements = [0] * comm.world_size()
    for p in (*first, *second):
        elements[optimizer.owner_of(p) or 0] += p.numel()
    return elements, before == [optimizer.owner_of(p) for p in first]


@pytest.mark.parametrize(
    "sizes, later",
    [([1, 2, 3, 4, 100], []), ([5] * 9, []), ([7, 1, 1], [50, 3, 3, 3]), ([0, 0, 1], [0]), (list(range(40)), [9] * 7)],
)
def test_elements_differ_by_the_largest_parameter_at_most(sizes: list[int], later: list[int]) -> None:
    results = run_ranks(elements_of_ranks, 3, sizes, later)
    elements, old_ones_stayed = results[0]
    assert results == [results[0]] * 3
    assert sum(elements) == sum(sizes) + sum(later)
    assert max(elements) - min(elements) <= max(sizes + later)
    assert old_ones_stayed


def fewer_than_ranks(kind: Kind) -> tuple[list[Tensor], int]:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    cls = SimpleShardedOptimizer if kind == "simple" else ShardedOptimizer
    optimizer = cls(model.named_parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], len(optimizer.state)


@KINDS
def test_fewer_parameters_than_ranks(kind: Kind) -> None:
    results, expected = run_ranks(fewer_than_ranks, 4, kind), run_ranks(fewer_than_ranks, 1, kind)[0]
    assert all(equal(parameters, expected[0]) for parameters, _ in results)
    assert [count for _, count in results] == [1, 1, 0, 0]


# State dicts


def go_on(sharded: Kind, first: int, last: int, before: dict[str, Any], own_part: bool) -> dict[str, Any]:
    """Train from step `first`, from the result of another training, in each setup."""
    results = {}
    for name in RESUMABLE:
        training = Training(SETUPS[name], sharded)
        if before:
            training.load(before[name])
        training.steps(first, last)
        if own_part:  # through this rank's own state dict, in an optimizer that has taken other steps
            other = Training(SETUPS[name], sharded)
            other.steps(first, last - 1)
            parameters = {name: p.detach() for name, p in training.model.named_parameters()}
            other.load({"parameters": parameters, "optimizer": training.optimizer.state_dict()})
            training = other
        results[name] = training.result()
    return results


RESUMABLE = ["own AdamW", "fused AdamW", "SGD momentum", "Adagrad", "groups", "missing"]


@pytest.mark.parametrize(
    "kind, sizes",
    [
        (True, (2, 3)),
        (True, (3, 1)),
        (True, (2, None)),
        (True, (None, 3)),
        ("simple", (2, 3)),
        pytest.param("simple", (None, 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_goes_on_at_another_world_size(kind: Kind, sizes: tuple[int | None, int | None]) -> None:
    """None: the plain optimizer."""
    results: list[dict[str, Any]] = [{}]
    for size, first, last in zip(sizes, (0, 2), (2, STEPS), strict=True):
        results = run_ranks(go_on, size or 1, size is not None and kind, first, last, results[0], False)
    for name in RESUMABLE:
        check([result[name] for result in results], alone(name), name)


@KINDS
def test_own_part_is_enough_to_load(kind: Kind) -> None:
    results = run_ranks(go_on, 2, kind, 0, STEPS, {}, True)
    for name in RESUMABLE:
        check([result[name] for result in results], alone(name), name)


# Errors


def test_refuses_invalid_arguments() -> None:
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="bucket_size_mb is 0"):
        ShardedOptimizer([p], torch.optim.SGD, bucket_size_mb=0)
    with pytest.raises(ValueError, match="empty parameter list"):
        ShardedOptimizer([], torch.optim.SGD)
    with pytest.raises(ValueError, match="learning rate: -1"):
        ShardedOptimizer([p], torch.optim.SGD, lr=-1)
    optimizer = ShardedOptimizer([p], torch.optim.SGD)
    with pytest.raises(ValueError, match=r"shape \(2,\) does not belong to this optimizer"):
        optimizer.owner_of(q)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(torch.optim.SGD([p, q]).state_dict())


def messages() -> list[str]:
    rank, found = comm.rank(), []

    def refused(parameters: list[nn.Parameter]) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            ShardedOptimizer(parameters, torch.optim.SGD)
        found.append(str(error.value))

    one = nn.Parameter(torch.zeros(1))
    refused([one, nn.Parameter(torch.zeros(2 + rank, 3))])
    refused([one, nn.Parameter(torch.zeros(2), requires_grad=rank == 0)])
    refused([one] if rank else [one, nn.Parameter(torch.zeros(1))])
    refused([one, nn.Parameter(torch.zeros(2, 3).t())])
    refused([nn.Parameter(torch.zeros(2, device="meta"))])

    optimizer = ShardedOptimizer([one], torch.optim.SGD, lr=0.5)
    with pytest.raises(ValueError, match="different parameters in the optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2 + rank))]})
    one.grad = torch.ones(1)
    optimizer.step()  # is as it was
    assert one.item() == -0.5
    return found


def test_refuses_parameters_that_differ_over_ranks_or_cannot_be_sent() -> None:
    for shape, frozen, count, strides, meta in run_ranks(messages, 2):
        differ = "different parameters in the optimizer: parameter 1 is "
        assert f"{differ}float32 (3, 3) on cpu on rank 1 and float32 (2, 3) on cpu on rank 0" in shape
        assert f"{differ}frozen float32 (2,) on cpu on rank 1 and float32 (2,) on cpu on rank 0" in frozen
        assert f"{differ}nothing on rank 1 and float32 (1,) on cpu on rank 0" in count
        assert strides.startswith("parameter 1 is float32 (3, 2) of strides (1, 3) on cpu, ")
        assert meta.startswith("parameter 0 is float32 (2,) on meta")


# NCCL


@pytest.mark.multigpu
@pytest.mark.parametrize("name", SETUPS)
def test_equals_the_plain_optimizer_on_nccl(name: str) -> None:
    check([results[name] for results in on_gpus()], alone(name, "cuda"))


def go_on_with_fused(before: dict[str, Any] | None) -> dict[str, Any]:
    first, last = (2, STEPS) if before is not None else (0, 2)
    training = Training(SETUPS["fused AdamW"], True, "cuda")
    if before is not None:
        training.load(before)
    training.steps(first, last)
    assert all(v.is_cuda for state in training.optimizer.state.values() for v in state.values())
    return training.result()


@pytest.mark.multigpu
def test_a_fused_optimizer_goes_on_from_a_state_dict_on_the_cpu() -> None:
    before = run_ranks(go_on_with_fused, 2, None, device="cuda")[0]
    check(run_ranks(go_on_with_fused, 2, before, device="cuda"), alone("fused AdamW", "cuda"))


def memory_of_moving() -> tuple[int, int]:
    """Additional bytes at the peak, and afterwards."""
    parameters = [nn.Parameter(torch.zeros(2**20, device="cuda")) for _ in range(64)]  # 4 MiB each
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1, bucket_size_mb=32)
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == 8
    del optimizer
    return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.multigpu
def test_moving_takes_a_piece_more_at_most() -> None:
    for peak, after in run_ranks(memory_of_moving, 2, device="cuda"):
        assert peak <= 32 * 2**20 + 4096
        assert after <= 4096
