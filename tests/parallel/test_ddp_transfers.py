"""The transfers of data parallelism: when they start, in which order, and how much travels in which dtype."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cs336_systems.parallel import Options, comm, get_strategy
from cs336_systems.parallel.bucketed import DDPBucketed
from cs336_systems.parallel.ddp import DDP, FlatDDP, NaiveDDP, cut_into_buckets
from tests.distributed import run_ranks
from tests.parallel.models import adamw, batch_of, build, mean_loss, part_of, sgd, train_step
from tests.parallel.test_ddp import FSDPS, OURS, on_two_ranks

# Order and time


def transfers_during_backward(cls: type[DDP], *options: Any) -> list[list[str]]:
    """The transfers started in each step, with a mark at the end of the backward pass."""
    events: list[str] = []
    start = comm.start_mean
    comm.start_mean = lambda tensors, what, *how: (events.append(what), start(tensors, what, *how))[1]
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
        assert storages == {bucket.flat.untyped_storage().data_ptr() for bucket in strategy._flat_buckets}
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
    return [name for bucket in strategy.buckets for name in bucket]


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
        orders.append([name.partition(".")[0] for bucket in strategy.buckets for name in bucket])
        strategy(torch.ones(1, 3)).sum().backward()
        strategy.finish_gradient_synchronization()
    return orders


@pytest.mark.parametrize("how", [(DDP,), (DDPBucketed, 0.002), (DDP, None, 0.002)], ids=["single", "buckets", "groups"])
def test_after_the_first_step_gradients_go_in_the_order_in_which_they_came(how: tuple[Any, ...]) -> None:
    for before, after in run_ranks(order_of_groups, 2, *how):
        assert before == ["third", "second", "first"]
        assert after == ["first", "third", "second"]


# Numbers and dtypes


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


def numbers_that_travel(options: dict[str, Any], name: str) -> dict[str, Counter[torch.dtype]]:
    """In a step, as `Transfers` counts."""
    module = build("transformer")
    strategy = get_strategy(name)(module, Options(bucket_size_mb=0.002, **options))
    with Transfers() as transfers:
        train_step(strategy, sgd(module.parameters()), part_of(0))
    return transfers.numbers


def test_gradients_in_bf16_are_sent_in_bf16() -> None:
    parameters = sum(p.numel() for p in build("transformer").parameters())
    names = [name for name in OURS if "grad_dtype" in get_strategy(name).options]
    for name, numbers in on_two_ranks(names, partial(numbers_that_travel, {"grad_dtype": torch.bfloat16})):
        sent = sum(numbers.values(), Counter())
        assert sent[torch.bfloat16] >= parameters, name
        assert sent[torch.float32] < parameters / 10, name  # the flags of used parameters
    for name, numbers in on_two_ranks(names, partial(numbers_that_travel, {})):
        sent = sum(numbers.values(), Counter())
        assert sent.keys() == {torch.float32}, name
        assert sent[torch.float32] >= parameters, name


def test_sharded_weights_are_cast_before_they_are_sent() -> None:
    for name, numbers in on_two_ranks(FSDPS, partial(numbers_that_travel, {"compute_dtype": torch.bfloat16})):
        assert (numbers["gather"].keys(), numbers["scatter"].keys()) == ({torch.bfloat16}, {torch.bfloat16}), name
    for name, numbers in on_two_ranks(FSDPS, partial(numbers_that_travel, {"grad_dtype": torch.bfloat16})):
        assert (numbers["gather"].keys(), numbers["scatter"].keys()) == ({torch.float32}, {torch.bfloat16}), name


def mean_in_fp16(name: str) -> float:
    module = nn.Linear(2, 2, bias=False)
    strategy = get_strategy(name)(module, Options(grad_dtype=torch.float16))
    strategy(torch.full((1, 2), 40_000.0)).sum().backward()
    strategy.finish_gradient_synchronization()
    return module.weight.grad.max().item()  # type: ignore[union-attr]


def test_a_mean_in_fp16_overflows_only_if_it_is_too_large_itself() -> None:
    for name, largest in on_two_ranks(["naive", "flat", "overlap", "bucketed", *FSDPS], mean_in_fp16):
        assert largest == 40_000.0, name
