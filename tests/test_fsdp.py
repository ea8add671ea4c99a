"""The assignment's tests of sharded data parallelism, in our words: through the adapters, by the handout's names."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_basics.model import Embedding, Linear, RMSNorm
from cs336_systems.parallel import comm
from tests import forked
from tests.adapters import fsdp_gather_full_params, fsdp_on_after_backward, get_fsdp
from tests.distributed import run_ranks

STEPS, BATCH, LENGTH, VOCAB_SIZE = 4, 12, 5, 30
TYPES = pytest.mark.parametrize("compute_dtype", [None, torch.float16], ids=["fp32", "fp16"])


class Small(nn.Module):
    """Every kind of layer that is sharded, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner = Embedding(VOCAB_SIZE, 16), Linear(16, 24)
        self.norm, self.head = RMSNorm(24), Linear(24, VOCAB_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.inner(self.tokens(x)).relu()))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randint(VOCAB_SIZE, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return numbers[0], numbers[1]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def train(compute_dtype: torch.dtype | None) -> list[dict[str, Tensor]]:
    """All weights after each step on this rank's part of the batches."""
    model = get_fsdp(build(), compute_dtype)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = (numbers.chunk(comm.world_size())[comm.rank()] for numbers in batch(step))
        loss_of(model, *mine).backward()
        fsdp_on_after_backward(model, optimizer)
        optimizer.step()
        states.append({name: p.clone() for name, p in fsdp_gather_full_params(model).items()})
    return states


@TYPES
def test_fsdp_correctness(compute_dtype: torch.dtype | None) -> None:
    """After every step, the weights of one process that computes in float32."""
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if compute_dtype is None else {"rtol": 1e-3, "atol": 1e-3}
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = run_ranks(train, 2, compute_dtype)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        for states in results:
            assert states[step].keys() == dict(model.named_parameters()).keys()
            for name, p in model.named_parameters():
                torch.testing.assert_close(states[step][name], p.detach(), **tolerance)


def gradients(compute_dtype: torch.dtype | None) -> dict[str, tuple[Tensor, bool]]:
    """Gradients of a loss that differs over the ranks, and whether they fit their parameters."""
    model = get_fsdp(build(), compute_dtype)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, *batch(comm.rank())).backward()
    fsdp_on_after_backward(model, optimizer)
    return {
        name: (p.grad, p.grad.shape == p.shape and p.grad.dtype == p.dtype == torch.float32)
        for name, p in model.module.named_parameters()
    }


@TYPES
def test_fsdp_gradient_sync(compute_dtype: torch.dtype | None) -> None:
    """Shards have gradients of their shape and type, and together those of the mean; replicated ones are equal."""
    first, second = run_ranks(gradients, 2, compute_dtype)
    model = build()
    (sum(loss_of(model, *batch(rank)) for rank in range(2)) / 2).backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if compute_dtype is None else {"rtol": 1e-2, "atol": 1e-3}
    for name, p in model.named_parameters():
        assert first[name][1]
        assert second[name][1]
        if name == "norm.weight":
            assert torch.equal(first[name][0], second[name][0])
            whole = first[name][0]
        else:
            whole = torch.cat((first[name][0], second[name][0]))
        torch.testing.assert_close(whole, p.grad, **tolerance)


def test_the_documents_show_that_halves_of_a_batch_differ_without_fsdp() -> None:
    """Their test of float32 asks for equal bits: a command tells where that is too much to ask."""
    document = (Path(__file__).parents[1] / "docs" / "assignment.md").read_text()
    (code,) = re.findall(r'python -c "\n(import torch\n.*?)"\n```', document, re.DOTALL)
    printed = forked.run([sys.executable, "-c", code], 60).stdout
    device, difference = printed.splitlines()[0].split()
    assert device == "cpu"
    assert 0 <= float(difference) < 1e-6
