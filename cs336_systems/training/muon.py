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
from .optimizer import MASTER, FusedAdamW, in_memory, local_part


class Muon(FusedAdamW):
    """Muon in the parameter groups that have a `momentum`, AdamW in the others.

    Muon's rate is the `lr` of its group times `lr_ratio`, so that one schedule sets both rates. As in FusedAdamW the
    host decides nothing, so a CUDA graph can hold the step: one that is skipped moves the weights by zeros.

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
        for p in parameters:
            if p not in self._owners:
                self._move(p, orthogonalize(self._direction(p, group)), group)
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
        rows = torch.cat([self._direction(p, group).flatten() for p in matrices if p is not None])
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
                self._move(p, update.view(local_part(p).shape), group)

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """Nesterov's direction, after an update of the momentum, in bfloat16: of this rank's rows."""
        buffer, momentum, counts = local_part(self.state[p]["momentum_buffer"]), group["momentum"], self._factor > 0
        gradient = torch.where(counts, in_memory(p.grad).to(torch.float32) * self._factor, 0.0)
        buffer.lerp_(gradient, (1 - momentum) * counts)
        return gradient.lerp(buffer, momentum).bfloat16()

    def _move(self, p: Tensor, update: Tensor, group: dict[str, Any]) -> None:
        """Decay this rank's rows of the weight and subtract an update, which gets a root mean square of 0.2 rates."""
        weight = local_part(self.state[p].get(MASTER, p.detach()))
        rate = group["lr"] * group["lr_ratio"] * (self._factor > 0)
        size = 0.2 * math.sqrt(max(self._shape(p)))
        weight.mul_(1 - rate * group["weight_decay"]).sub_(update.to(torch.float32) * (rate * size))
        if MASTER in self.state[p]:
            local_part(p.detach()).copy_(weight)

    def _shape(self, p: Tensor) -> tuple[int, int]:
        """The shape of the whole matrix."""
        return sum(self._rows[p]) if p in self._rows else p.shape[0], p.shape[1]
