"""Data parallelism: every rank has the whole model and its own part of the batch, and gradients are averaged.

The strategies differ in when they communicate. `NaiveDDP` sends the gradients one by one after the backward pass,
`FlatDDP` all at once. `DDP` sends each one, or several together, as soon as they are ready, during the backward pass.
`DDPBucketed` in `bucketed.py` does so too, and keeps several gradients in one tensor. All strategies leave the same
gradients (Li et al. 2020, "PyTorch Distributed", section 3).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from . import comm, peer_memory
from .strategy import Strategy, UsedParameters, weak_hook


class NaiveDDP(Strategy):
    """After the backward pass, one all-reduce per parameter, one after the other."""

    def finish_gradient_synchronization(self) -> None:
        names = {p: name for name, p in self.module.named_parameters()}
        used = UsedParameters(self.trainable())
        flags = used.fill_missing_gradients()
        for p in self.trainable():
            assert p.grad is not None
            comm.start_mean([p.grad], f"all-reduce of the gradient of {names[p]}", self.grad_dtype).wait()
        comm.mean([flags], "all-reduce of the flags of used parameters")
        used.drop_unused_gradients()


class FlatDDP(Strategy):
    """After the backward pass, one all-reduce per dtype, of all its gradients flattened together."""

    def finish_gradient_synchronization(self) -> None:
        used = UsedParameters(self.trainable())
        tensors = [used.fill_missing_gradients(), *(p.grad for p in self.trainable() if p.grad is not None)]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, group in by_dtype.items():
            name = f"all-reduce of all gradients in {dtype}"
            comm.check_dense(group, name)
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            comm.start_mean([flat], name, self.grad_dtype).wait()
            parts = flat.split([tensor.numel() for tensor in group])
            torch._foreach_copy_(group, [part.view(t.shape) for part, t in zip(parts, group, strict=True)])
        used.drop_unused_gradients()


def cut_into_buckets(parameters: list[nn.Parameter], max_bytes: float) -> list[list[nn.Parameter]]:
    """Group consecutive parameters with gradients of one dtype and device into buckets of at most max_bytes.

    A larger parameter has a bucket to itself. Buckets are in the order in which they become complete.
    """
    index = {p: i for i, p in enumerate(parameters)}
    buckets: list[list[nn.Parameter]] = []
    filling: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        kind = (p.grad_dtype or p.dtype), p.device
        bucket = filling.setdefault(kind, [])
        if bucket and sum(q.numel() for q in (*bucket, p)) * kind[0].itemsize > max_bytes:
            buckets.append(bucket)
            bucket = filling[kind] = []
        bucket.append(p)
    return sorted([*buckets, *filling.values()], key=lambda bucket: index[bucket[-1]])


class DDP(Strategy):
    """The strategy `overlap`: sends each gradient as soon as it is computed, while the backward pass goes on.

    The order of transfers is fixed, because ranks may use different parameters: a gradient that is ready before its
    turn waits for the earlier ones, and parameters without a gradient send zeros at the end. In the first step the
    order is the reverse of registration; after that it is the order in which gradients became ready on rank 0.

    With bucket_size_mb (in 2^20 bytes), consecutive gradients of at most that size are one collective over many
    tensors, each sent from where it is. Unfreeze parameters before wrapping. If you drop the gradients of a backward
    pass, all ranks must have reached the same parameters in it.

    Raises ValueError if bucket_size_mb is not above 0 and finite.
    """

    def __init__(
        self, module: nn.Module, grad_dtype: torch.dtype | None = None, bucket_size_mb: float | None = None
    ) -> None:
        if bucket_size_mb is not None and not 0 < bucket_size_mb < math.inf:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}: it must be above 0 and finite")
        super().__init__(module, grad_dtype)
        self._max_bytes = 0 if bucket_size_mb is None else bucket_size_mb * 2**20
        self._names = {p: name for name, p in module.named_parameters()}
        self._frozen = [p for p in module.parameters() if not p.requires_grad]
        self._used = UsedParameters(self.trainable())
        self._order = self.trainable()[::-1]
        self._order_known = False
        self._all_reduce = self._all_reduce_by_copies()
        self._build_buckets()
        for p in self._order:
            p.register_post_accumulate_grad_hook(weak_hook(self._post_accumulate_grad))

    def _all_reduce_by_copies(self) -> peer_memory.AllReduce | None:
        """What averages the large tensors of a bucket if GPUs reach each other's memory."""
        if not self._order or not peer_memory.can_reach_peers(self._order[0].device):
            return None
        own = [p.grad_dtype or p.dtype for p in self._order]
        sent = [self.grad_dtype or dtype for dtype in own]
        sizes = [p.numel() * dtype.itemsize for p, dtype in zip(self._order, sent, strict=True)]
        widened = max(dtype.itemsize / before.itemsize for dtype, before in zip(sent, own, strict=True))
        largest = min(max(self._max_bytes * widened, *sizes), sum(sizes))
        return peer_memory.AllReduce(math.ceil(largest), len(sizes), self._order[0].device)

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters in each bucket, in the order of sending."""
        return [[self._names[p] for p in bucket] for bucket in self._buckets]

    def _build_buckets(self) -> None:
        self._buckets = cut_into_buckets(self._order, self._max_bytes)
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._reset()

    def _reset(self) -> None:
        self._reached: set[nn.Parameter] = set()  # by any backward pass of this step
        self._ready: dict[nn.Parameter, None] = {}  # gradients of the last backward pass, in order
        self._pending = [len(bucket) for bucket in self._buckets]  # parameters without a gradient yet
        self._transfers: list[comm.Transfer] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._ready and all(p.grad is None for p in self._ready):  # gradients dropped by an optimizer's zero_grad
            self._discard_backward()
        return super().forward(*inputs, **kwargs)

    def _post_accumulate_grad(self, p: nn.Parameter) -> None:
        self._reached.add(p)
        if not self._synchronizing and not self._ready:
            return
        if p in self._ready or not self._synchronizing:  # a gradient that may be in flight cannot be added to
            raise RuntimeError(
                f"a second backward pass reached {self._names[p]} before finish_gradient_synchronization: all backward "
                "passes of a step but the last belong inside no_sync()"
            )
        self._ready[p] = None
        self._pending[self._bucket_of[p]] -= 1
        # Buckets start in their fixed order: the number of transfers is the index of the next bucket.
        while len(self._transfers) < len(self._buckets) and self._pending[len(self._transfers)] == 0:
            self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        bucket = self._buckets[len(self._transfers)]
        more = f" and {len(bucket) - 1} more" if len(bucket) > 1 else ""
        name = f"all-reduce of the gradient of {self._names[bucket[0]]}{more}"
        by_copies = None if self._all_reduce is None else self._all_reduce.start
        self._transfers.append(comm.start_mean(self._tensors_to_send(bucket), name, self.grad_dtype, by_copies))

    def _tensors_to_send(self, bucket: list[nn.Parameter]) -> list[Tensor]:
        """The tensors to send for a bucket whose gradients are all ready."""
        return [p.grad for p in bucket if p.grad is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and discard a backward pass that has not been finished."""
        self._discard_backward()
        super().zero_grad(set_to_none)

    def _discard_backward(self) -> None:
        for transfer in self._transfers:
            transfer.wait()
        self._reset()

    def _is_missing(self, p: nn.Parameter) -> bool:
        return p.grad is None

    def finish_gradient_synchronization(self) -> None:
        for p in self._frozen:
            if p.requires_grad:
                raise ValueError(f"{self._names[p]} was frozen when its module was wrapped and is not now: its "
                                 "gradients would differ from rank to rank; unfreeze it before, or wrap the module "
                                 "again")  # fmt: skip
        flags = self._used.fill_missing_gradients(self._is_missing)
        while len(self._transfers) < len(self._buckets):
            self._start_next_bucket()
        self._transfers.append(comm.start_mean([flags], "all-reduce of the flags of used parameters"))
        for transfer in self._transfers:
            transfer.wait()
        self._used.drop_unused_gradients()
        if self._order_known:
            self._reset()
            return
        # The order in which gradients became ready on rank 0 is the order of all further steps.
        parameters = self.trainable()
        numbers = {p: i for i, p in enumerate(parameters)}
        order_on_rank_0 = comm.all_gather_objects([numbers[p] for p in self._ready], "order of the gradients")[0]
        first = [parameters[i] for i in order_on_rank_0]
        self._order = first + [p for p in self._order if p not in set(first)]
        self._order_known = True
        self._build_buckets()


class IndividualDDP(DDP):
    """`DDP` that sends each gradient by itself, whatever the bucket size."""

    def __init__(self, module: nn.Module, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__(module, grad_dtype)
