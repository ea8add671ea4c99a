"""The assignment's tests of data parallelism under the handout's names, through the adapters.

The strategies' own tests, which ask for much more, are in `tests/parallel`.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.parallel import comm
from tests import adapters
from tests.distributed import run_ranks


class Tied(nn.Module):
    """Two layers share a weight, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3, bias=False)
        self.middle.weight = self.first.weight
        self.middle.bias.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def compare_with_one_process(wrap: str, arguments: tuple[Any, ...], after_backward: str, batch_start: str) -> None:
    """Five steps on this rank's half of a batch beside five steps of a copy on the whole of it."""
    torch.manual_seed(comm.rank())
    parallel = getattr(adapters, wrap)(Tied(), *arguments)  # other weights on each rank until here
    alone = copy.deepcopy(parallel.module)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (parallel, alone)]
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(5)), torch.zeros(8, 3)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if batch_start:
            getattr(adapters, batch_start)(parallel, optimizers[0])
        mine = slice(4 * comm.rank(), 4 * comm.rank() + 4)
        nn.functional.mse_loss(parallel(x[mine]), y[mine]).backward()
        nn.functional.mse_loss(alone(x), y).backward()
        getattr(adapters, after_backward)(parallel, optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
    for (name, actual), expected in zip(parallel.module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, msg=lambda m, n=name: f"{n}: {m}")


def check(wrap: str, arguments: tuple[Any, ...], after_backward: str, batch_start: str = "") -> None:
    run_ranks(compare_with_one_process, 2, wrap, arguments, after_backward, batch_start)


def test_DistributedDataParallel() -> None:
    check("get_ddp", (), "ddp_on_after_backward")


@pytest.mark.parametrize("bucket_size_mb", [0.0016, 0.0001, 0.01])
def test_DistributedDataParallelBucketed(bucket_size_mb: float) -> None:
    hooks = ("ddp_bucketed_on_after_backward", "ddp_bucketed_on_train_batch_start")
    check("get_ddp_bucketed", (bucket_size_mb,), *hooks)
