"""Data parallelism on gloo: equal to one process on the whole batch, whatever the model does with its parameters."""

import contextlib
import copy
import pickle
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.parallel import Options, comm, get_strategy
from cs336_systems.parallel.bucketed import DDPBucketed
from cs336_systems.parallel.ddp import DDP, FlatDDP, NaiveDDP, cut_into_buckets
from cs336_systems.parallel.fsdp import FSDP
from cs336_systems.parallel.ranks import alone
from cs336_systems.parallel.zero1 import ShardedOptimizer
from tests.distributed import run_ranks
from tests.parallel.models import adamw, batch_of, build, mean_loss, message_of, sgd, train_alone, train_step

STEPS = 10
OURS = ("naive", "flat", "individual", "overlap", "bucketed", "tests.parallel.own_strategies:Gathering")
"""overlap is told a size, so it sends several gradients in a call; individual is the same with one a call. The last is
one from outside of the package, written as the contract allows it and none of ours is."""
FSDPS = ("fsdp", "fsdp_simple")
IN_OTHER_TYPES = [name for name in OURS if "grad_dtype" in get_strategy(name).options]
"""Those that send gradients in another dtype if they are told to, which a strategy need not."""


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_ranks_equal(states: list[dict[str, Tensor]]) -> None:
    """To the last bit."""
    for other in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(tensor, other[name]), name


def train_on_ranks(
    name: str,
    model: str,
    options: dict[str, Any],
    micro_batches: int = 1,
    own_zero_grad: bool = True,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    device: str = "cpu",
) -> dict[str, Tensor]:
    """The whole state after STEPS on this rank's parts of the batches, from weights that differ over the ranks."""
    module = build(model, seed=comm.rank()).to(device)
    strategy = get_strategy(name)(module, Options(**options))
    optimizer = make_optimizer(module.parameters())
    for step in range(STEPS):
        mine = batch_of(step).to(device).chunk(comm.world_size())[comm.rank()]
        train_step(strategy, optimizer, mine, micro_batches, own_zero_grad)
    return {key: value.cpu() for key, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("model", ["awkward", "transformer"])
@pytest.mark.parametrize("name", OURS)
def test_equals_one_process(name: str, model: str, world_size: int) -> None:
    options = {"bucket_size_mb": 0.002}
    states = run_ranks(train_on_ranks, world_size, name, model, options)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone(model, STEPS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("own_zero_grad", [True, False])
@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("name", OURS)
def test_accumulation(name: str, micro_batches: int, own_zero_grad: bool) -> None:
    options = {"bucket_size_mb": 0.001}
    states = run_ranks(train_on_ranks, 2, name, "awkward", options, micro_batches, own_zero_grad, sgd)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone("awkward", STEPS, sgd), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", IN_OTHER_TYPES)
def test_gradients_travel_in_bf16(name: str) -> None:
    options = {"grad_dtype": torch.bfloat16, "bucket_size_mb": 0.002}
    states = run_ranks(train_on_ranks, 2, name, "transformer", options, 1, True, sgd)
    assert_ranks_equal(states)
    expected = train_alone("transformer", STEPS, sgd)
    assert_close(states[0], expected, rtol=0.05, atol=0.02)  # bf16 has 8 bits
    assert any(not torch.allclose(states[0][k], v, rtol=1e-5, atol=1e-6) for k, v in expected.items())


@pytest.mark.parametrize(
    "name, options", [("torch_ddp", {}), ("torch_fsdp", {}), ("torch_fsdp", {"reshard_after_forward": False})]
)
def test_the_peers_do_the_same(name: str, options: dict[str, Any]) -> None:
    states = run_ranks(train_on_ranks, 2, name, "transformer", options)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone("transformer", STEPS), rtol=1e-4, atol=1e-5)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", [*OURS, "fsdp_simple", "torch_ddp", "torch_fsdp"])
def test_equals_one_process_on_gpus(name: str) -> None:
    states = run_ranks(
        train_on_ranks, 2, name, "transformer", {"bucket_size_mb": 0.002}, 2, True, adamw, "cuda", device="cuda"
    )
    assert_ranks_equal(states)
    assert_close(states[0], train_alone("transformer", STEPS), rtol=1e-3, atol=1e-4)


# Parameters that not all ranks use


class Branches(nn.Module):
    """Uses `a`, `b` or both, as it is told; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, which: str) -> Tensor:
        parts = [getattr(self, name)(x) for name in which]
        return torch.stack(parts).sum()


def gradients_of_branches(name: str, uses: list[str]) -> list[dict[str, Tensor | None]]:
    torch.manual_seed(0)
    module = Branches()
    strategy = get_strategy(name)(module, Options(bucket_size_mb=1e-5))
    seen = []
    for _ in range(3):  # also after the order has been learnt
        strategy.zero_grad()
        strategy(torch.ones(1, 3), uses[comm.rank()]).backward()
        strategy.finish_gradient_synchronization()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
    return seen


@pytest.mark.parametrize("uses", [["ab", "ab"], ["ab", "a"], ["a", "b"], ["b", "ab"], ["ab", "ba"]])
@pytest.mark.parametrize("name", OURS)
def test_parameters_that_some_ranks_do_not_use(name: str, uses: list[str]) -> None:
    for seen in run_ranks(gradients_of_branches, 2, name, uses):
        for gradients in seen:
            assert gradients["never.weight"] is None
            assert gradients["never.bias"] is None
            for branch in "ab":
                share = sum(branch in used for used in uses) / 2
                for kind in ("weight", "bias"):
                    gradient = gradients[f"{branch}.{kind}"]
                    assert gradient is not None
                    assert torch.equal(gradient, torch.full_like(gradient, share))


def trained_on_equal_batches(name: str | None, model: str, steps: int = 4) -> dict[str, Tensor]:
    module = build(model)
    strategy = get_strategy(name or "none")(module, Options(bucket_size_mb=0.002))
    optimizer = adamw(module.parameters())
    for step in range(steps):
        train_step(strategy, optimizer, batch_of(step))
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("model", ["transformer", "awkward"])
@pytest.mark.parametrize("name", [*OURS, *FSDPS])
def test_on_equal_batches_weights_are_those_of_one_process_bit_for_bit(name: str, model: str) -> None:
    """Then nothing is rounded: the mean of equal gradients of two or four ranks is the gradient itself."""
    (expected,) = run_ranks(trained_on_equal_batches, 1, None, model)
    for world_size in (2, 4):
        for found in run_ranks(trained_on_equal_batches, world_size, name, model):
            assert found.keys() == expected.keys()
            assert [key for key in found if not torch.equal(found[key], expected[key])] == []


# Ranks with different numbers of tokens


def weighted_gradients(name: str) -> list[Tensor]:
    module = build("transformer")
    strategy = get_strategy(name)(module, Options())
    batch = batch_of(0)
    mine = batch[:1] if comm.rank() == 0 else batch[1:]
    (mean_loss(strategy, mine) * comm.mean_weight(len(mine))).backward()
    strategy.finish_gradient_synchronization()
    gradients = {p: p.grad for p in module.parameters() if p.grad is not None}
    if not strategy.sharded:
        return [*gradients.values()]
    for p, gradient in gradients.items():  # gathered as the weights are
        p.data.copy_(gradient)
    state = strategy.full_state_dict()
    return [state[name] for name, _ in module.named_parameters()]


@pytest.mark.parametrize("name", [*OURS, *FSDPS])
def test_ranks_with_different_numbers_of_tokens_give_the_mean_over_all(name: str) -> None:
    module = build("transformer")
    mean_loss(module, batch_of(0)).backward()
    for gradients in run_ranks(weighted_gradients, 2, name):
        for actual, p in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(actual, p.grad, rtol=1e-4, atol=1e-6)


# Order and time of transfers


def transfers_during_backward(cls: type[DDP], *options: Any) -> list[list[str]]:
    """The transfers started in each step, with a mark at the end of the backward pass."""
    events: list[str] = []
    start = comm.start_mean
    comm.start_mean = lambda tensors, what, wire=None: (events.append(what), start(tensors, what, wire))[1]
    module = build("transformer")
    strategy = cls(module, *options)
    steps = []
    for step in range(3):
        events.clear()
        strategy.zero_grad()
        mean_loss(strategy, batch_of(step)).backward()
        events.append("end of backward")
        strategy.finish_gradient_synchronization()
        steps.append(list(events))
    return steps


def test_overlap_sends_every_gradient_before_the_end_of_the_backward_pass() -> None:
    for steps in run_ranks(transfers_during_backward, 2, DDP):
        for events in steps:
            *gradients, end, flags = events
            assert len(gradients) == len(list(build("transformer").parameters()))
            assert end == "end of backward"
            assert "flags" in flags


def test_naive_and_flat_send_nothing_before_the_end() -> None:
    for cls in (NaiveDDP, FlatDDP):
        for events in run_ranks(transfers_during_backward, 2, cls)[0]:
            assert events[0] == "end of backward"


@pytest.mark.parametrize("how", [(DDPBucketed, 0.002), (DDP, None, 0.002)], ids=["buckets", "groups"])
def test_buckets_and_groups_are_sent_during_the_backward_pass_in_the_order_of_completion(
    how: tuple[Any, ...],
) -> None:
    parameters = len(list(build("transformer").parameters()))
    for first, *later in run_ranks(transfers_during_backward, 2, *how):
        assert first.index("end of backward") > 1
        for events in later:
            *gradients, end, _ = events
            assert 1 < len(gradients) < parameters
            assert any(" more" in what for what in gradients)
            assert end == "end of backward"
            assert "lm_head" in gradients[0]
            assert "token_embeddings" in gradients[-1] or "ln1" in gradients[-1] or "q_proj" in gradients[-1]


def gradients_are_views() -> None:
    module = build("transformer")
    strategy = DDPBucketed(module, 0.002)
    optimizer = adamw(module.parameters())
    for step in range(3):
        train_step(strategy, optimizer, batch_of(step))
        if step == 0:
            strategy.zero_grad()  # the buckets are cut anew
        storages = {p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}
        assert storages == {bucket.flat.untyped_storage().data_ptr() for bucket in strategy._buckets}
        before = {p: p.grad.data_ptr() for p in module.parameters() if p.grad is not None}
        strategy.zero_grad()
        mean_loss(strategy, batch_of(step)).backward()
        assert before == {p: p.grad.data_ptr() for p in module.parameters() if p.grad is not None}
        strategy.finish_gradient_synchronization()


def gradients_in_groups_stay_where_they_are() -> list[str]:
    module = build("transformer")
    strategy = DDP(module, bucket_size_mb=0.002)
    mean_loss(strategy, batch_of(0)).backward()
    before = {p: p.grad.data_ptr() for p in module.parameters() if p.grad is not None}
    assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None}) == len(before)
    strategy.finish_gradient_synchronization()
    assert before == {p: p.grad.data_ptr() for p in module.parameters() if p.grad is not None}
    return [name for group in strategy.groups for name in group]


def test_groups_copy_nothing_and_hold_every_parameter_once() -> None:
    names = [name for name, _ in build("transformer").named_parameters()]
    for found in run_ranks(gradients_in_groups_stay_where_they_are, 2):
        assert sorted(found) == sorted(names)


def test_gradients_are_views_of_their_buckets_and_stay_where_they_are() -> None:
    run_ranks(gradients_are_views, 2)


def test_buckets_hold_at_most_their_size_and_a_larger_tensor_is_alone() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (10, 20, 300, 5, 5, 90, 10)]
    buckets = cut_into_buckets(parameters, 400)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[10, 20], [300], [5, 5, 90], [10]]


def test_buckets_are_of_one_type() -> None:
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64]
    buckets = cut_into_buckets([nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes], 1e9)
    assert [[p.dtype for p in bucket] for bucket in buckets] == [[torch.float32] * 2, [torch.float64] * 2]


# Mistakes


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("cls", [DDP, DDPBucketed])
def test_a_bucket_size_that_is_not_positive_and_finite_is_refused(cls: type[DDP], size: float) -> None:
    with pytest.raises(ValueError, match="bucket_size_mb is"):
        cls(nn.Linear(2, 2), bucket_size_mb=size)


def backward_twice(name: str) -> str:
    module = nn.Linear(2, 2)
    strategy = get_strategy(name)(module, Options())
    strategy(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="inside no_sync") as error:
        strategy(torch.ones(1, 2)).sum().backward()
    strategy.finish_gradient_synchronization()
    return str(error.value)


@pytest.mark.parametrize("name", ["overlap", "bucketed"])
def test_two_backward_passes_without_no_sync_are_refused(name: str) -> None:
    assert "weight" in run_ranks(backward_twice, 1, name)[0] or "bias" in run_ranks(backward_twice, 1, name)[0]


def step_on_sparse(name: str) -> str:
    strategy = get_strategy(name)(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)), Options())

    def step() -> None:
        strategy(torch.tensor([1, 2])).sum().backward()
        strategy.finish_gradient_synchronization()

    return message_of(step)


@pytest.mark.parametrize("name", ["naive", "flat", "individual", "overlap", "bucketed"])
def test_sparse_gradients_are_refused(name: str) -> None:
    for message in run_ranks(step_on_sparse, 2, name):
        assert re.fullmatch(
            "ValueError: .*gradient.*: a tensor is torch.sparse_coo: only dense ones can be .*", message
        )


def test_acting_alone_ends_with_its_context() -> None:
    assert run_ranks(world_sizes_when_alone, 2) == 2 * [[1, 1, 2]]


def world_sizes_when_alone() -> list[int]:
    sizes = []
    with alone():
        with alone():
            sizes.append(comm.world_size())
        sizes.append(comm.world_size())
    return [*sizes, comm.world_size()]


def different_modules() -> str:
    module = nn.Linear(2, 2 + comm.rank())
    with pytest.raises(ValueError, match="different parameters") as error:
        NaiveDDP(module)
    return str(error.value)


def test_ranks_with_different_shapes_are_told_which() -> None:
    for message in run_ranks(different_modules, 2):
        assert "weight is float32 (3, 2) on rank 1 and float32 (2, 2) on rank 0" in message


def after_a_dropped_step(name: str, own_zero_grad: bool, fails: bool) -> dict[str, Tensor]:
    """A backward pass that is not finished, or breaks off, then a step as if it had not been."""
    module = build("transformer")
    strategy = get_strategy(name)(module, Options(bucket_size_mb=0.002))
    optimizer = sgd(module.parameters())
    mine = batch_of(0).chunk(comm.world_size())[comm.rank()]
    train_step(strategy, optimizer, mine, own_zero_grad=own_zero_grad)
    clear = strategy.zero_grad if own_zero_grad else optimizer.zero_grad
    clear()

    def fail_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if fails:
            output.register_hook(lambda gradient: 1 / 0)

    handle = module.token_embeddings.register_forward_hook(fail_in_backward)  # the last that backward comes to
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        mean_loss(strategy, mine * 0).backward()
    handle.remove()
    clear()
    train_step(strategy, optimizer, batch_of(1).chunk(comm.world_size())[comm.rank()], own_zero_grad=own_zero_grad)
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("fails", [False, True], ids=["dropped", "broken off"])
@pytest.mark.parametrize("own_zero_grad", [True, False])
@pytest.mark.parametrize("name", [*OURS, *FSDPS])
def test_a_dropped_step_leaves_nothing_behind(name: str, own_zero_grad: bool, fails: bool) -> None:
    states = run_ranks(after_a_dropped_step, 2, name, own_zero_grad, fails)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone("transformer", 2, sgd), rtol=1e-4, atol=1e-5)


def frozen_on_one_rank() -> str:
    with pytest.raises(ValueError, match="different parameters") as error:
        DDP(nn.Linear(2, 3).requires_grad_(comm.rank() == 0))
    return str(error.value)


def test_a_parameter_that_is_frozen_on_one_rank_only_is_refused() -> None:
    for message in run_ranks(frozen_on_one_rank, 2):
        assert "weight is frozen float32 (3, 2) on rank 1 and float32 (3, 2) on rank 0" in message


def without_a_backward_pass(name: str) -> list[bool]:
    module = nn.Linear(2, 3)
    strategy = get_strategy(name)(module, Options(bucket_size_mb=0.002))
    strategy.finish_gradient_synchronization()
    strategy(torch.ones(1, 2)).sum().backward()
    strategy.finish_gradient_synchronization()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    strategy.finish_gradient_synchronization()
    return [p.grad is not None and torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", [*OURS, *FSDPS])
def test_a_step_may_be_finished_without_a_backward_pass_and_again(name: str, world_size: int) -> None:
    assert run_ranks(without_a_backward_pass, world_size, name) == [[True, True]] * world_size


def one_branch_after_the_other(name: str) -> list[bool]:
    module = Branches()
    strategy = get_strategy(name)(module, Options(bucket_size_mb=0.002))
    for branch in ("a", "b"):
        strategy(torch.ones(1, 3), branch).backward()
        strategy.finish_gradient_synchronization()
    return [p.grad is not None for p in (module.a.weight, module.b.weight)]


@pytest.mark.parametrize("name", [*OURS, *FSDPS])
def test_a_gradient_that_is_not_cleared_is_kept_by_a_step_that_does_not_use_it(name: str) -> None:
    assert run_ranks(one_branch_after_the_other, 2, name) == [[True, True]] * 2


def evaluated_first(name: str) -> dict[str, Tensor]:
    module = build("transformer")
    strategy = get_strategy(name)(module, Options(bucket_size_mb=0.002))
    optimizer = sgd(module.parameters())
    for step in range(3):
        mine = batch_of(step).chunk(comm.world_size())[comm.rank()]
        with torch.inference_mode():
            mean_loss(strategy, mine)
        train_step(strategy, optimizer, mine)
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("name", [*OURS, *FSDPS])
def test_inference_between_steps_changes_nothing(name: str) -> None:
    states = run_ranks(evaluated_first, 2, name)
    assert_close(states[0], train_alone("transformer", 3, sgd), rtol=1e-4, atol=1e-5)


class Shuffled(nn.Module):
    """Calls its layers in another order than that in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.third(self.second(x)))


def order_of_groups(cls: type[DDP], *options: Any) -> list[list[str]]:
    strategy = cls(Shuffled(), *options)
    orders = []
    for _ in range(2):
        orders.append([name.partition(".")[0] for group in strategy.groups for name in group])
        strategy(torch.ones(1, 3)).sum().backward()
        strategy.finish_gradient_synchronization()
    return orders


@pytest.mark.parametrize("how", [(DDP,), (DDPBucketed, 0.002), (DDP, None, 0.002)], ids=["single", "buckets", "groups"])
def test_after_the_first_step_gradients_go_in_the_order_in_which_they_came(how: tuple[Any, ...]) -> None:
    for before, after in run_ranks(order_of_groups, 2, *how):
        assert before == ["third", "second", "first"]
        assert after == ["first", "third", "second"]


class Transfers(TorchDispatchMode):
    """Counts the floating-point numbers that are sent inside, and received, by kind of collective and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, Counter[torch.dtype]] = {"reduce": Counter(), "gather": Counter(), "scatter": Counter()}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "c10d":
            kind = next(kind for kind in ("scatter", "gather", "reduce") if kind in str(operator))
            for tensor in tree_leaves(args):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():  # objects are sent as bytes
                    self.numbers[kind][tensor.dtype] += tensor.numel()
        return operator(*args, **(kwargs or {}))


def numbers_that_travel(name: str, options: dict[str, Any]) -> dict[str, Counter[torch.dtype]]:
    """In a step, as `Transfers` counts."""
    module = build("transformer")
    strategy = get_strategy(name)(module, Options(bucket_size_mb=0.002, **options))
    with Transfers() as transfers:
        train_step(strategy, sgd(module.parameters()), batch_of(0).chunk(comm.world_size())[comm.rank()])
    return transfers.numbers


@pytest.mark.parametrize("name", IN_OTHER_TYPES)
def test_gradients_in_bf16_are_sent_in_bf16(name: str) -> None:
    parameters = sum(p.numel() for p in build("transformer").parameters())
    for numbers in run_ranks(numbers_that_travel, 2, name, {"grad_dtype": torch.bfloat16}):
        sent = sum(numbers.values(), Counter())
        assert sent[torch.bfloat16] >= parameters
        assert sent[torch.float32] < parameters / 10  # the flags of used parameters
    for numbers in run_ranks(numbers_that_travel, 2, name, {}):
        sent = sum(numbers.values(), Counter())
        assert sent.keys() == {torch.float32}
        assert sent[torch.float32] >= parameters


@pytest.mark.parametrize("name", FSDPS)
def test_sharded_weights_are_cast_before_they_are_sent(name: str) -> None:
    for numbers in run_ranks(numbers_that_travel, 2, name, {"compute_dtype": torch.bfloat16}):
        assert (numbers["gather"].keys(), numbers["scatter"].keys()) == ({torch.bfloat16}, {torch.bfloat16})
    for numbers in run_ranks(numbers_that_travel, 2, name, {"grad_dtype": torch.bfloat16}):
        assert (numbers["gather"].keys(), numbers["scatter"].keys()) == ({torch.float32}, {torch.bfloat16})


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


def compressed_by_torch() -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        get_strategy("torch_ddp")(nn.Linear(2, 2), Options(grad_dtype=torch.bfloat16))
    return str(error.value)


def test_torch_ddp_refuses_dtypes_that_it_cannot_compress_to() -> None:
    for message in run_ranks(compressed_by_torch, 2):
        assert message.startswith("parallel.grad_dtype is bf16: it must be same, fp32 or fp16 with parallel.strategy ")


def wrapped(name: str, module: nn.Module, **options: Any) -> Any:
    return get_strategy(name)(module, Options(**options))


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


def refused() -> dict[str, str]:
    def linear() -> nn.Linear:
        return nn.Linear(2, 4, bias=False)

    names = ("a", "b") if comm.rank() == 0 else ("b", "a")
    expanded = nn.Module()
    expanded.register_buffer("mask", torch.ones(1).expand(3) if comm.rank() == 0 else torch.ones(3))
    found = {
        "order": message_of(lambda: wrapped("naive", nn.ModuleDict({name: linear() for name in names}))),
        "expanded": message_of(lambda: wrapped("naive", expanded)),
        "nested": message_of(lambda: wrapped("overlap", nn.Sequential(linear(), wrapped("naive", linear())))),
    }
    sharded = nn.Sequential(linear())
    kept = wrapped("fsdp", sharded).full_state_dict()["0.weight"]
    found["sharded"] = message_of(lambda: wrapped("bucketed", sharded))
    assert kept.shape == (4, 2)
    return found


def test_modules_with_a_strategy_inside_or_of_shards_are_refused() -> None:
    for found in run_ranks(refused, 2):
        assert found["order"].endswith("different parameters: number 0 is b.weight on rank 1 and a.weight on rank 0")
        assert "mask is float32 (3,) on rank 1 and float32 (3,), expanded along 0 on rank 0" in found["expanded"]
        assert found["nested"].startswith("ValueError: module is a Sequential: its 1 is a NaiveDDP")
        assert found["sharded"].startswith("ValueError: 0.weight is this rank's part of a sharded parameter")


def thawed(name: str) -> str:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[0].requires_grad_(False)
    strategy = wrapped(name, module)
    module[0].requires_grad_(True)
    strategy(torch.ones(1, 2)).sum().backward()
    return message_of(strategy.finish_gradient_synchronization)


@pytest.mark.parametrize("name", ["overlap", "bucketed", "fsdp"])
def test_parameters_thawed_after_wrapping_are_refused(name: str) -> None:
    for said in run_ranks(thawed, 2, name):
        assert said.startswith("ValueError: 0.weight was frozen when its module was wrapped and is not now")


def after_a_dropped_micro_batch(name: str, by_optimizer: bool) -> list[Tensor | None]:
    strategy = wrapped(name, Branches())
    optimizer = torch.optim.SGD(strategy.parameters(), lr=0.1)
    clear = optimizer.zero_grad if by_optimizer else strategy.zero_grad
    for _ in range(2):
        clear()
        strategy(torch.ones(1, 3), "ab").backward()
        strategy.finish_gradient_synchronization()
        optimizer.step()
    clear()
    with strategy.no_sync():
        strategy(torch.full((1, 3), 5.0), "ab").backward()
    clear()
    strategy(torch.ones(1, 3), "ab" if comm.rank() == 0 else "a").backward()
    strategy.finish_gradient_synchronization()
    return [strategy.module.get_parameter(f"{branch}.bias").grad for branch in "ab"]


@pytest.mark.parametrize("by_optimizer", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_a_dropped_micro_batch_leaves_nothing_behind(name: str, by_optimizer: bool) -> None:
    for of_a, of_b in run_ranks(after_a_dropped_micro_batch, 2, name, by_optimizer):
        assert torch.equal(of_a, torch.ones(2))
        assert of_b is not None
        assert torch.equal(of_b, torch.full((2,), 0.5))


def accumulates_last(name: str) -> str:
    strategy = wrapped(name, nn.Linear(2, 1))
    strategy(torch.ones(1, 2)).sum().backward()

    def backward_without_sync() -> None:
        with strategy.no_sync():
            strategy(torch.ones(1, 2)).sum().backward()

    said = message_of(backward_without_sync)
    strategy.finish_gradient_synchronization()
    return said


@pytest.mark.parametrize("name", ["overlap", "bucketed"])
def test_a_backward_pass_in_no_sync_after_a_synchronizing_one_is_refused(name: str) -> None:
    for said in run_ranks(accumulates_last, 2, name):
        assert "before finish_gradient_synchronization: all backward passes of a step but the last belong" in said


def mean_in_fp16(name: str) -> float:
    module = nn.Linear(2, 2, bias=False)
    strategy = wrapped(name, module, grad_dtype=torch.float16)
    strategy(torch.full((1, 2), 40_000.0)).sum().backward()
    strategy.finish_gradient_synchronization()
    return module.weight.grad.max().item()  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["naive", "flat", "overlap", "bucketed", *FSDPS])
def test_a_mean_in_fp16_overflows_only_if_it_is_too_large_itself(name: str) -> None:
    assert run_ranks(mean_in_fp16, 2, name) == [40_000.0] * 2


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
