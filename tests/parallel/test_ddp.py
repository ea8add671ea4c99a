"""Data parallelism on gloo: equal to one process on the whole batch, whatever the model does with its parameters."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.parallel import Options, comm, get_strategy
from cs336_systems.parallel.strategy import Strategy
from tests.distributed import run_ranks
from tests.parallel.models import (
    STEPS,
    adamw,
    assert_close,
    assert_ranks_equal,
    batch_of,
    build,
    check_each,
    check_training,
    for_each,
    mean_loss,
    part_of,
    sgd,
    train_alone,
    train_step,
)

OURS = ("naive", "flat", "individual", "overlap", "bucketed", "tests.parallel.own_strategies:Gathering")
"""overlap is told a size, so it sends several gradients in a call; individual is the same with one a call. The last is
one from outside of the package, written as the contract allows it and none of ours is."""
FSDPS = ("fsdp", "fsdp_simple")
ALL = (*OURS, *FSDPS)
SMALL = 0.002  # bucket_size_mb, of several buckets


@pytest.mark.parametrize("model, world_size", [("awkward", 1), ("awkward", 4), ("transformer", 2)])
def test_equals_one_process(model: str, world_size: int) -> None:
    check_each(OURS, model, world_size, bucket_size_mb=SMALL)


@pytest.mark.parametrize("micro_batches, own_zero_grad", [(4, True), (2, False)])
def test_accumulation(micro_batches: int, own_zero_grad: bool) -> None:
    given = dict(micro_batches=micro_batches, own_zero_grad=own_zero_grad, bucket_size_mb=0.001)
    check_each(OURS, "awkward", 2, sgd, **given)


@pytest.mark.parametrize("name", [name for name in OURS if "grad_dtype" in get_strategy(name).options])
def test_gradients_travel_in_bf16(name: str) -> None:
    tolerance = (0.05, 0.02)  # bf16 has 8 bits
    options = {"grad_dtype": torch.bfloat16, "bucket_size_mb": SMALL}
    state, _ = check_training(name, "transformer", 2, sgd, tolerance=tolerance, **options)
    expected = train_alone("transformer", STEPS, sgd)
    assert any(not torch.allclose(state[k], v, rtol=1e-5, atol=1e-6) for k, v in expected.items())


@pytest.mark.parametrize(
    "name, options", [("torch_ddp", {}), ("torch_fsdp", {}), ("torch_fsdp", {"reshard_after_forward": False})]
)
def test_the_peers_do_the_same(name: str, options: dict[str, Any]) -> None:
    check_training(name, "transformer", **options)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", [*OURS, "fsdp_simple", "torch_ddp", "torch_fsdp"])
def test_equals_one_process_on_gpus(name: str) -> None:
    given: dict[str, Any] = dict(tolerance=(1e-3, 1e-4), micro_batches=2, bucket_size_mb=SMALL)
    check_training(name, "transformer", 2, adamw, "cuda", **given)


# Parameters that not all ranks use


class Branches(nn.Module):
    """Uses `a`, `b` or both, as it is told; `never` is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, which: str) -> Tensor:
        parts = [getattr(self, name)(x) for name in which]
        return torch.stack(parts).sum()


def on_two_ranks(names: Sequence[str], function: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """What a function returns for each strategy on each of two ranks, with the strategy's name."""
    for of_rank in run_ranks(for_each, 2, names, function):
        yield from of_rank.items()


USES = (["ab", "ab"], ["ab", "a"], ["a", "b"], ["b", "ab"], ["ab", "ba"])


def gradients_of_branches(name: str) -> list[list[dict[str, Tensor | None]]]:
    return [three_steps(name, uses[comm.rank()]) for uses in USES]


def three_steps(name: str, which: str) -> list[dict[str, Tensor | None]]:
    module = Branches()
    strategy = get_strategy(name)(module, Options(bucket_size_mb=1e-5))
    seen = []
    for _ in range(2):  # also after the order has been learnt
        strategy.zero_grad()
        strategy(torch.ones(1, 3), which).backward()
        strategy.finish_gradient_synchronization()
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
    return seen


def test_parameters_that_some_ranks_do_not_use() -> None:
    for name, of_rank in on_two_ranks(OURS, gradients_of_branches):
        for uses, steps in zip(USES, of_rank, strict=True):
            for gradients in steps:
                assert gradients["never.weight"] is None, name
                assert gradients["never.bias"] is None, name
                for branch in "ab":
                    share = sum(branch in used for used in uses) / 2
                    for kind in ("weight", "bias"):
                        gradient = gradients[f"{branch}.{kind}"]
                        assert gradient is not None, (name, uses)
                        assert torch.equal(gradient, torch.full_like(gradient, share)), (name, uses)


def trained_on_equal_batches(model: str, name: str) -> dict[str, Tensor]:
    module = build(model)
    strategy = get_strategy(name)(module, Options(bucket_size_mb=SMALL))
    optimizer = adamw(module.parameters())
    for step in range(STEPS):
        train_step(strategy, optimizer, batch_of(step))
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


@pytest.mark.parametrize("model, world_size", [("transformer", 2), ("awkward", 4)])
def test_on_equal_batches_weights_are_those_of_one_process_bit_for_bit(model: str, world_size: int) -> None:
    """Then nothing is rounded: the mean of equal gradients of two or four ranks is the gradient itself."""
    expected = run_ranks(trained_on_equal_batches, 1, model, "none")[0]
    train = functools.partial(trained_on_equal_batches, model)
    for of_rank in run_ranks(for_each, world_size, ALL, train):
        for name, found in of_rank.items():
            assert found.keys() == expected.keys(), name
            assert [key for key in found if not torch.equal(found[key], expected[key])] == [], name


# Ranks with different numbers of tokens


def own_gradients(strategy: Strategy) -> list[Tensor]:
    """The gradients that a parameter has; if the weights are sharded, this rank's rows of them."""
    return [p.grad for p in strategy.module.parameters() if p.grad is not None]


def weighted_gradients(name: str) -> list[Tensor]:
    module = build("transformer")
    strategy = get_strategy(name)(module, Options())
    batch = batch_of(0)
    mine = batch[:1] if comm.rank() == 0 else batch[1:]
    (mean_loss(strategy, mine) * comm.mean_weight(len(mine))).backward()
    strategy.finish_gradient_synchronization()
    if not strategy.sharded:
        return own_gradients(strategy)
    for p, gradient in zip(module.parameters(), own_gradients(strategy), strict=True):  # gathered as the weights are
        p.data.copy_(gradient)
    state = strategy.full_state_dict()
    return [state[name] for name, _ in module.named_parameters()]


def test_ranks_with_different_numbers_of_tokens_give_the_mean_over_all() -> None:
    module = build("transformer")
    mean_loss(module, batch_of(0)).backward()
    for name, gradients in on_two_ranks(ALL, weighted_gradients):
        for actual, p in zip(gradients, module.parameters(), strict=True):
            torch.testing.assert_close(actual, p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# Steps that are dropped, repeated or interrupted


WAYS_TO_DROP = [(own_zero_grad, fails) for own_zero_grad in (True, False) for fails in (False, True)]


def after_dropped_steps(name: str) -> list[dict[str, Tensor]]:
    return [after_a_dropped_step(name, *how) for how in WAYS_TO_DROP]


def after_a_dropped_step(name: str, own_zero_grad: bool, fails: bool) -> dict[str, Tensor]:
    """A backward pass that is not finished, or breaks off, then a step as if it had not been."""
    module = build("transformer")
    strategy = get_strategy(name)(module, Options(bucket_size_mb=SMALL))
    optimizer = sgd(module.parameters())
    mine = part_of(0)
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
    train_step(strategy, optimizer, part_of(1), own_zero_grad=own_zero_grad)
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


def test_a_dropped_step_leaves_nothing_behind() -> None:
    expected = train_alone("transformer", 2, sgd)
    first, second = run_ranks(for_each, 2, ALL, after_dropped_steps)
    for name in ALL:
        for states in zip(first[name], second[name], strict=True):
            assert_ranks_equal(states)
            assert_close(states[0], expected, rtol=1e-4, atol=1e-5)


def after_a_dropped_micro_batch(by_optimizer: bool, name: str) -> list[Tensor | None]:
    strategy = get_strategy(name)(Branches(), Options())
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
def test_a_dropped_micro_batch_leaves_nothing_behind(by_optimizer: bool) -> None:
    for name, (of_a, of_b) in on_two_ranks(OURS, functools.partial(after_a_dropped_micro_batch, by_optimizer)):
        assert torch.equal(of_a, torch.ones(2)), name
        assert of_b is not None, name
        assert torch.equal(of_b, torch.full((2,), 0.5)), name


def without_a_backward_pass(name: str) -> list[bool]:
    module = nn.Linear(2, 3)
    strategy = get_strategy(name)(module, Options(bucket_size_mb=SMALL))
    strategy.finish_gradient_synchronization()
    strategy(torch.ones(1, 2)).sum().backward()
    strategy.finish_gradient_synchronization()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    strategy.finish_gradient_synchronization()
    return [p.grad is not None and torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_may_be_finished_without_a_backward_pass_and_again(world_size: int) -> None:
    expected = {name: [True, True] for name in ALL}
    assert run_ranks(for_each, world_size, ALL, without_a_backward_pass) == [expected] * world_size


def one_branch_after_the_other(name: str) -> list[Tensor]:
    strategy = get_strategy(name)(Branches(), Options(bucket_size_mb=SMALL))
    for branch in ("a", "b"):
        strategy(torch.full((1, 3), 1.0 + comm.rank()), branch).backward()
        strategy.finish_gradient_synchronization()
    return own_gradients(strategy)


def test_a_gradient_that_is_not_cleared_is_kept_by_a_step_that_does_not_use_it() -> None:
    for name, gradients in on_two_ranks(ALL, one_branch_after_the_other):
        assert len(gradients) == 4, name  # two weights and two biases
        assert all(torch.equal(g, torch.full_like(g, 1.0 if g.ndim == 1 else 1.5)) for g in gradients), name


def evaluated_first(name: str) -> dict[str, Tensor]:
    module = build("transformer")
    strategy = get_strategy(name)(module, Options(bucket_size_mb=SMALL))
    optimizer = sgd(module.parameters())
    for step in range(2):
        mine = part_of(step)
        with torch.inference_mode():
            mean_loss(strategy, mine)
        train_step(strategy, optimizer, mine)
    return {key: value.clone() for key, value in strategy.full_state_dict().items()}


def test_inference_between_steps_changes_nothing() -> None:
    expected = train_alone("transformer", 2, sgd)
    for _, state in on_two_ranks(ALL, evaluated_first):
        assert_close(state, expected, rtol=1e-4, atol=1e-5)
