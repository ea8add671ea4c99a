"""What every strategy is: a module around a module, and the contract by which the training loop uses it."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cs336_basics.nn_utils import clip_gradient

from . import comm


class Strategy(nn.Module):
    """One process, nothing to communicate: the strategy `none`, and what the others have in common.

    At the start all ranks get rank 0's parameters and buffers. Gradients are averaged over ranks between
    `backward` and the optimizer's step: where ranks have different numbers of tokens, each scales its mean loss by
    `comm.mean_weight`. A parameter that no rank has used has no gradient afterwards; one that some have used has one,
    with zeros for the others.

    Raises ValueError where the ranks' modules are not alike.
    """

    def __init__(self, module: nn.Module, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        self.grad_dtype = grad_dtype
        self._synchronizing = True
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        comm.check_same(
            {name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for name, t in tensors.items()},
            "parameters",
        )
        comm.broadcast([t.detach() for t in tensors.values()], "broadcast of the parameters")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay on this process, for accumulation over micro-batches."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """To be called between the last backward and the optimizer's step; returns when gradients are averaged.

        On a GPU "returns" means that what is queued after it sees them.
        """

    def clip_gradient(self, max_norm: float = math.inf) -> Tensor:
        """Scale the averaged gradients to a common 2-norm of at most max_norm; return the norm before, a tensor."""
        return clip_gradient(self.module.parameters(), max_norm)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict that one process alone would have. All ranks call it together."""
        return {name: tensor.detach() for name, tensor in self.module.state_dict().items()}

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        """By name, the parameters of which this rank has some rows only: the whole shape, and the first row it has."""
        return {}

    @property
    def sharded(self) -> bool:
        """Whether the module on this rank is not whole, so that it can only be called on all ranks together."""
        return bool(self.shards())

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that have gradients, each once, in the order in which the module registered them."""
        return [p for p in self.module.parameters() if p.requires_grad]


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method as a hook that does not keep its object alive, and does nothing once that is gone.

    A parameter holds its hooks where Python's collector cannot see them, so a strategy that they hold would never be
    freed: it holds the parameter in turn.
    """
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return hook


class UsedParameters:
    """Which parameters some rank has used, agreed on while their gradients are averaged.

    A rank that has not used a parameter sends zeros in its place, so that all ranks send the same. Whether anybody has
    used it travels as a flag, which only a rank that has not used it waits for.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._missing: list[int] = []
        self._flags = torch.ones(len(parameters), device=parameters[0].device if parameters else None)

    def fill(self, is_missing: Callable[[nn.Parameter], bool] = lambda p: p.grad is None) -> Tensor:
        """Put zeros where there is no gradient; return the flags, to be averaged with the gradients."""
        self._missing = [i for i, p in enumerate(self._parameters) if is_missing(p)]
        self._flags.fill_(1)
        for i in self._missing:
            p = self._parameters[i]
            self._flags[i] = 0
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return self._flags

    def settle(self) -> None:
        """After the flags' way: take back the gradients that nobody has."""
        if self._missing:
            used = self._flags.tolist()
            for i in self._missing:
                if not used[i]:
                    self._parameters[i].grad = None
