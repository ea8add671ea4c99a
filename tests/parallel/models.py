"""Small models with everything that data parallelism has to cope with, and training them in one process: the truth."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cs336_basics.model import TransformerLM
from cs336_systems.parallel.strategy import Strategy

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
    return TransformerLM(VOCAB_SIZE, LENGTH, d_model=12, num_layers=3, num_heads=2, d_ff=20)


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


def train_alone(
    name: str, steps: int, make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, seed: int = 0
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


def message_of(call: Callable[[], Any]) -> str:
    """The type and message of the error that a call raises."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
