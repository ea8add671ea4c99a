"""Parallel strategies by name: each wraps a module, and the training loop does not know which one it has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class SingleProcess(nn.Module):
    """The strategy contract with nothing to communicate: one process, the same code path as with many."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay on this process, for accumulation over micro-batches."""
        yield

    def finish_gradient_synchronization(self) -> None:
        """To be called between the last backward and the optimizer's step; returns when gradients are averaged."""


STRATEGIES: dict[str, Callable[[nn.Module], SingleProcess]] = {"none": SingleProcess}
