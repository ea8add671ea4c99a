"""Small models with everything that data parallelism has to cope with, trained on ranks and in one process."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cs336_basics.model import TransformerLM
from cs336_systems.parallel import Options, comm, get_strategy
from cs336_systems.parallel.strategy import Strategy
from tests.distributed import run_ranks

STEPS = 3  # the first learns an order, the second uses it, and more do the same again
VOCAB_SIZE, LENGTH, BATCH = 11, 6, 8


class Awkward(nn.Module):
    """Tied, frozen and unused parameters, a buffer, two dtypes, and one weight that is larger than a small bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, 12)
        self.first = nn.Linear(12, 7)
        self.frozen = nn.Linear(7, 12)
        self.frozen.weight.requires_grad = False
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Linear(12, 40, bias=False)
        self.narrow = nn.Linear(40, 12).double()
        self.register_buffer("offset", torch.randn(12))
        self.head = nn.Linear(12, VOCAB_SIZE, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.frozen(self.first(x).relu()) + self.offset
        x = self.narrow(self.wide(x).relu().double()).float()
        return self.head(x)


def transformer() -> nn.Module:
    return TransformerLM(VOCAB_SIZE, LENGTH, d_model=12, num_layers=2, num_heads=2, d_ff=20)


MODELS: dict[str, Callable[[], nn.Module]] = {"awkward": Awkward, "transformer": transformer}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch_of(step: int) -> Tensor:
    """The whole batch of a step, (BATCH, LENGTH + 1) tokens."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, VOCAB_SIZE, (BATCH, LENGTH + 1), generator=generator)


def mean_loss(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@functools.cache
def train_alone(
    name: str, steps: int = STEPS, make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, seed: int = 0
) -> dict[str, Tensor]:
    """The state dict of one process that trains on whole batches."""
    model = build(name, seed)
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(model, batch_of(step)).backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def train_step(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    micro_batches: int = 1,
    own_zero_grad: bool = True,
) -> None:
    """A step on this rank's part of a batch, in some micro-batches of equal size."""
    if own_zero_grad:
        strategy.zero_grad()
    else:
        optimizer.zero_grad()
    pieces = tokens.chunk(micro_batches)
    for piece in pieces[:-1]:
        with strategy.no_sync():
            (mean_loss(strategy, piece) / micro_batches).backward()
    (mean_loss(strategy, pieces[-1]) / micro_batches).backward()
    strategy.finish_gradient_synchronization()
    optimizer.step()


def for_each(names: Sequence[str], function: Callable[[str], Any]) -> dict[str, Any]:
    """What a function returns for each strategy, one after the other on the same ranks, which saves starting more."""
    results = {}
    for name in names:
        try:
            results[name] = function(name)
        except BaseException as error:
            error.add_note(f"in {name}")
            raise
    return results


def part_of(step: int) -> Tensor:
    """This rank's part of the batch of a step."""
    return batch_of(step).chunk(comm.world_size())[comm.rank()]


def train_on_ranks(
    name: str,
    model: str,
    micro_batches: int = 1,
    own_zero_grad: bool = True,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    device: str = "cpu",
    before_wrapping: Callable[[nn.Module], None] = lambda module: None,
    after_wrapping: Callable[[nn.Module], None] = lambda module: None,
    **options: Any,
) -> dict[str, Tensor]:
    """The whole state after STEPS on this rank's parts of the batches, from weights that differ over the ranks."""
    module = build(model, seed=comm.rank()).to(device)
    before_wrapping(module)
    strategy = get_strategy(name)(module, Options(**options))
    after_wrapping(module)
    optimizer = make_optimizer(module.parameters())
    for step in range(STEPS):
        train_step(strategy, optimizer, part_of(step).to(device), micro_batches, own_zero_grad)
    return {key: value.cpu() for key, value in strategy.full_state_dict().items()}


def check_training(
    name: str,
    model: str,
    world_size: int = 2,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    device: str = "cpu",
    tolerance: tuple[float, float] = (1e-4, 1e-5),
    train: Callable[..., dict[str, Tensor]] = train_on_ranks,
    **given: Any,
) -> list[dict[str, Tensor]]:
    """The states of `train` on each rank. They must be equal, and close to that of one process."""
    call = functools.partial(train, name, model, make_optimizer=make_optimizer, device=device, **given)
    states = run_ranks(call, world_size, device=device, timeout_s=240)
    assert_ranks_equal(states)
    assert_close(states[0], train_alone(model, STEPS, make_optimizer), rtol=tolerance[0], atol=tolerance[1])
    return states


def check_each(
    names: Sequence[str],
    model: str,
    world_size: int = 2,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    tolerance: tuple[float, float] = (1e-4, 1e-5),
    **given: Any,
) -> None:
    """`check_training` of several strategies, one after the other on the same ranks."""
    call = functools.partial(train_on_ranks, model=model, make_optimizer=make_optimizer, **given)
    expected = train_alone(model, STEPS, make_optimizer)
    of_ranks = run_ranks(for_each, world_size, names, call)

    def check(name: str) -> None:
        states = [of_rank[name] for of_rank in of_ranks]
        assert_ranks_equal(states)
        assert_close(states[0], expected, rtol=tolerance[0], atol=tolerance[1])

    for_each(names, check)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def assert_ranks_equal(states: Sequence[dict[str, Tensor]]) -> None:
    """To the last bit."""
    for other in states[1:]:
        assert [name for name, tensor in states[0].items() if not torch.equal(tensor, other[name])] == []


def message_of(call: Callable[[], Any]) -> str:
    """The type and message of the error that a call raises."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
