"""Muon for the blocks' matrices, AdamW for all other parameters.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Updates are as large as AdamW's (Liu et
al. 2025, "Muon is Scalable for LLM Training"). `torch.optim.Muon` with adjust_lr_fn="match_rms_adamw" does the same.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from cs336_basics.optimizer import orthogonalize

from ..parallel import comm
from ..parallel.owners import assign_owners
from ..parallel.strategy import is_shard
from ..planner.accounting import orthogonalization_flops
from .optimizer import FusedAdamW, assign, in_memory, joined, local_part, rest_of

BATCH = 2**24
"""Numbers that are orthogonalised together at most, unless one matrix has more: about 10 bytes each of temporaries."""


class Muon(FusedAdamW):
    """Muon in the parameter groups that have a `momentum`, AdamW in the others.

    Muon's rate is the `lr` of its group times `lr_ratio`, so that one schedule sets both rates. As in FusedAdamW the
    host decides nothing, so a CUDA graph can hold the step. Matrices of equal shape are orthogonalised together, so
    that small ones fill a GPU.

    Only a whole matrix can be orthogonalised, so each one whose rows are sharded has an owner, and the work is spread
    evenly over the ranks. A round takes one matrix of each rank: their rows go to the owners and come back
    orthogonalised, in bfloat16, because the owners compute in it. While one round is computed, the next is gathered and
    the one before is sent back.
    """

    def __init__(self, params: Iterable[Any], **adamw: Any) -> None:
        self._rows: dict[Tensor, tuple[int, ...]] = {}  # of each sharded matrix, how many each rank has
        self._owners: dict[Tensor, int] = {}
        super().__init__(params, **adamw)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their state. If some are sharded, all ranks call it together."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if sharded := [p for p in group["params"] if "momentum" in group and is_shard(p)]:
            rows = comm.all_gather_objects([len(local_part(p)) for p in sharded], "rows of the sharded matrices")
            self._rows |= dict(zip(sharded, zip(*rows, strict=True), strict=True))
            work = {p: orthogonalization_flops(*self._shape(p)) for p in sharded}
            assign_owners(work, self._owners)

    def _initial_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if "momentum" not in group:
            return super()._initial_state(p, group)
        return {"momentum_buffer": torch.zeros_like(p, dtype=torch.float32)}  # its name in torch.optim.Muon

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if "momentum" not in group:
            super()._update(parameters, group)
            return
        for batch in _batches([p for p in parameters if p not in self._owners]):
            directions = self._directions(batch, group).view(len(batch), *batch[0].shape)
            self._move(batch, orthogonalize(directions).unbind(), group)
        present = set(parameters)
        owned = [  # most work first, so that a round's matrices are alike
            [p for p, owner in self._owners.items() if owner == rank and p in present]
            for rank in range(comm.world_size())
        ]
        under_way: deque[Iterator[None]] = deque(maxlen=3)  # older ones are done
        for matrices in [*zip_longest(*owned), None, None]:
            if matrices is not None:
                under_way.appendleft(self._round(matrices, group))
            for each in under_way:
                next(each, None)

    def _round(self, matrices: Sequence[Tensor | None], group: dict[str, Any]) -> Iterator[None]:
        """Update one matrix of each owner, None where it has no more, up to where the next transfer is under way."""
        own = matrices[comm.rank()]
        theirs = [0 if p is None else local_part(p).numel() for p in matrices]
        mine = [0] * len(theirs) if own is None else [count * own.shape[1] for count in self._rows[own]]
        rows = self._directions([p for p in matrices if p is not None], group)
        whole = rows.new_empty(sum(mine))
        transfer = comm.start_all_to_all(whole, rows, mine, theirs, "gather of matrices' momentum")
        yield
        transfer.wait()
        if own is not None:
            whole = orthogonalize(whole.view(self._shape(own))).flatten()
        rows = torch.empty_like(rows)
        transfer = comm.start_all_to_all(rows, whole, theirs, mine, "scatter of matrices' updates")
        yield
        transfer.wait()
        for p, update in zip(matrices, rows.split(theirs), strict=True):
            if p is not None:
                self._move([p], [update.view(local_part(p).shape)], group)

    def _directions(self, parameters: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
        """Nesterov's directions after an update of the momentum, in bfloat16: this rank's rows, one after the other."""
        gradients = [in_memory(p.grad) for p in parameters]
        buffers = [local_part(self.state[p]["momentum_buffer"]) for p in parameters]
        how: dict[str, Any] = dict(factor=self._factor, momentum=group["momentum"])
        if self._factor.is_cuda:
            from ..kernels.muon import directions

            return directions(gradients, buffers, self._tables, **how)
        return directions_torch(gradients, buffers, **how)

    def _move(self, parameters: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Decay this rank's rows of matrices of one shape; subtract updates with a root mean square of 0.2 rates."""
        weights = [[local_part(t) for t in (rest_of(p, self.state[p]), p.detach())] for p in parameters]
        rate, size = group["lr"] * group["lr_ratio"], 0.2 * math.sqrt(max(self._shape(parameters[0])))
        how: dict[str, Any] = dict(factor=self._factor, rate=rate, size=size, weight_decay=group["weight_decay"])
        if self._factor.is_cuda:
            from ..kernels.muon import move

            move(updates, weights, self._tables, **how)
        else:
            move_torch(updates, weights, **how)

    def _shape(self, p: Tensor) -> tuple[int, int]:
        """The shape of the whole matrix."""
        return sum(self._rows[p]) if p in self._rows else p.shape[0], p.shape[1]


def _batches(matrices: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of equal shape, some at a time."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for p in matrices:
        alike.setdefault(p.shape, []).append(p)
    for some in alike.values():
        count = math.ceil(len(some) / max(1, BATCH // some[0].numel()))
        yield from (some[i * len(some) // count : (i + 1) * len(some) // count] for i in range(count))


def directions_torch(
    gradients: Sequence[Tensor], buffers: Sequence[Tensor], *, factor: Tensor, momentum: float
) -> Tensor:
    """`kernels.muon.directions` in plain PyTorch. Waits for the device."""
    sizes = [g.numel() for g in gradients]
    found = gradients[0].new_empty(sum(sizes), dtype=torch.bfloat16)
    if factor > 0:
        for gradient, buffer, direction in zip(gradients, buffers, found.split(sizes), strict=True):
            g = gradient.to(torch.float32) * factor
            buffer.lerp_(g, 1 - momentum)
            direction.copy_(g.lerp_(buffer, momentum).flatten())
    return found


def move_torch(
    updates: Sequence[Tensor],
    weights: Sequence[Sequence[Tensor]],
    *,
    factor: Tensor,
    rate: Tensor,
    size: float,
    weight_decay: float,
) -> None:
    """`kernels.muon.move` in plain PyTorch. Waits for the device."""
    if not factor > 0:
        return
    for update, (rest, weight) in zip(updates, weights, strict=True):
        moved = joined(weight, rest).mul_(1 - rate * weight_decay).sub_(update.to(torch.float32) * (rate * size))
        if weight.dtype != torch.float32:
            assign(moved, weight, rest)
