"""Fully sharded data parallelism in its plainest form. Read it before `fsdp.py`, which hides the communication.

ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3). Every rank keeps some rows of each weight. The weights of a module
are all-gathered before its forward pass and freed after it, then all-gathered again before its backward pass. As soon
as a gradient is complete, it is reduce-scattered and its weight is freed. Every transfer is waited for at once.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import comm
from .fsdp_modules import Holders, describe_shards, find_fsdp_modules, find_weights
from .strategy import Strategy, mark_as_shard, weak_hook


class ShardedParam:
    """One weight: the parameter keeps this rank's rows, and `full` has memory only between unshard and reshard."""

    def __init__(self, shard: nn.Parameter, name: str, holders: Holders, compute_dtype: Any, grad_dtype: Any) -> None:
        self.shard, self.name, self.holders, self.shape = shard, name, holders, shard.shape
        rows = -(-shard.shape[0] // comm.world_size())  # of each rank; the last ranks pad theirs with zeros
        self.shard_shape = torch.Size((rows, *shard.shape[1:]))
        self.first_row = min(comm.rank() * rows, shard.shape[0])
        padded_shape = torch.Size((comm.world_size() * rows, *shard.shape[1:]))
        self.padded = torch.empty(padded_shape, dtype=compute_dtype or shard.dtype, device=shard.device)
        # `.data` has its own version counter, so autograd does not see the all-gather as an in-place change of the
        # saved `full`.
        self.full = nn.Parameter(self.padded.data[: shard.shape[0]], requires_grad=shard.requires_grad)
        if shard.requires_grad:
            self.full.register_post_accumulate_grad_hook(weak_hook(self.reduce_scatter))
        self.grad_dtype = grad_dtype or self.padded.dtype
        shard.data = shard.data[self.first_row : self.first_row + rows].clone()
        mark_as_shard(shard)
        self.reshard()

    def all_gather(self, out: Tensor) -> Tensor:
        """The whole weight, in the first rows of `out`, which has the padded shape."""
        mine = out.new_zeros(self.shard_shape)
        mine[: len(self.shard)] = self.shard.detach()
        comm.start_all_gather([out], [mine], f"all-gather of {self.name}").wait()
        return out[: self.shape[0]]

    def unshard(self) -> None:
        storage = self.padded.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.padded.nbytes)
            self.all_gather(self.padded)
        for parameters, key in self.holders:
            parameters[key] = self.full

    def reshard(self) -> None:
        self.padded.untyped_storage().resize_(0)
        for parameters, key in self.holders:
            parameters[key] = self.shard

    def reduce_scatter(self, full: Any) -> None:
        """Add this rank's rows of the mean gradient to the shard's gradient. Called when the gradient is complete."""
        gradient = torch.zeros_like(self.padded, dtype=self.grad_dtype)
        gradient[: len(full)] = full.grad
        full.grad = None
        mine = gradient.new_empty(self.shard_shape)
        comm.start_reduce_scatter_mean([mine], [gradient], f"reduce-scatter of {self.name}").wait()
        mean = mine[: len(self.shard)].to(self.shard.grad_dtype)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
        self.reshard()


def _unshard(weights: list[ShardedParam], *_: Any) -> None:
    for weight in weights:
        weight.unshard()


def _post_forward(weights: list[ShardedParam], module: nn.Module, inputs: Any, output: Any) -> None:
    if torch._C._current_graph_task_id() != -1:  # inside backward, so checkpointing recomputes: keep the weights
        return
    for weight in weights:
        weight.reshard()
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_unshard, weights))  # called before the backward pass of the module


class SimpleFSDP(Strategy):
    """Shards the weights of Linear and Embedding by rows, gathers them block by block, and replicates the rest.

    All ranks must use the same weights in the same order. Gradients are averaged in every backward pass, also inside
    `no_sync`. Freeze or unfreeze, cast and move parameters before wrapping. compute_dtype, grad_dtype: as in `FSDP`.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None,
                 grad_dtype: torch.dtype | None = None) -> None:  # fmt: skip
        super().__init__(module, grad_dtype)
        holders, names = find_weights(module), {p: name for name, p in module.named_parameters()}
        self._weights = {p: ShardedParam(p, names[p], holders[p], compute_dtype, grad_dtype) for p in holders}
        for fsdp_module in find_fsdp_modules(module, holders):
            weights = [self._weights[p] for p in fsdp_module.parameters() if p in self._weights]
            fsdp_module.register_forward_pre_hook(partial(_unshard, weights))
            fsdp_module.register_forward_hook(partial(_post_forward, weights))

    def finish_gradient_synchronization(self) -> None:
        for weight in self._weights.values():
            weight.reshard()  # those whose gradient has not come are still whole
        replicated = [p.grad for p in self.trainable() if p not in self._weights and p.grad is not None]
        comm.start_mean(replicated, "mean of the replicated gradients", self.grad_dtype).wait()

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        whole = super()._gather_whole([part for part in parts if part not in self._weights], keep)
        return whole | {p: keep(w.all_gather(p.new_empty(w.padded.shape))) for p, w in self._weights.items()}

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        return describe_shards(self.module, self._weights)
