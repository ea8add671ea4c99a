"""ZeRO stage 1 in its plainest form (Rajbhandari et al. 2020, "ZeRO", section 5.1). Read it before `zero1.py`.

The parameters are divided among the ranks. Each rank keeps optimizer state for its own parameters alone, updates them,
and broadcasts them to the others.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import comm
from .zero1_checks import check_parameters


class SimpleShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)` with its state divided among the ranks.

    `param_groups` hold all parameters, and changes to them take effect. `state` is this rank's part. All ranks call
    `step` and `add_param_group` together, with equal parameters and gradients.
    """

    def __init__(self, params: Iterable[Any], optimizer_cls: type[Optimizer], **kwargs: Any) -> None:
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._local: Optimizer | None = None  # updates this rank's own parameters
        self._owners: dict[Tensor, int] = {}
        self._loads = [0] * comm.world_size()  # elements that each rank owns
        super().__init__(params, {})  # the groups get the defaults of optimizer_cls

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. Each goes to the rank that has the fewest elements so far."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_parameters(group["params"])
        for p in group["params"]:
            self._owners[p] = self._loads.index(min(self._loads))
            self._loads[self._owners[p]] += p.numel()
        own = {**group, "params": [p for p in group["params"] if self._owners[p] == comm.rank()]}
        if self._local is None:
            self._local = self._optimizer_cls([own], **self._kwargs)
            self.state = self._local.state
        else:
            self._local.add_param_group(own)
        self.param_groups[-1] = {**self._local.param_groups[-1], "params": group["params"]}  # with the defaults

    def owner_of(self, parameter: Tensor) -> int:
        """The rank that keeps the state of a parameter."""
        return self._owners[parameter]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the own parameters, then receive the others. Returns the loss of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        assert self._local is not None
        for own, group in zip(self._local.param_groups, self.param_groups, strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})  # the learning rate, say
        self._local.step(**kwargs)
        comm.start_broadcasts([(p.detach(), rank) for p, rank in self._owners.items()], "updated parameters").wait()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's own part of a state dict, which may be a full one or hold only that part."""
        super().load_state_dict(state_dict)
        for p in [p for p in self.state if self._owners[p] != comm.rank()]:
            del self.state[p]
        assert self._local is not None
        self._local.state = self.state
