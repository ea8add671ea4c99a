"""Overlapped data parallelism with buckets: one tensor holds several gradients, and is sent when all of them are ready.

Every transfer has a fixed cost besides its bytes, and a model has many small gradients (Li et al. 2020, section 3.2.3).
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import comm
from .ddp import DDP


class FlatBucket:
    """One flat tensor whose views are the gradients, all of one dtype, of some parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].grad_dtype, device=parameters[0].device)
        self.views = [v.view(p.shape) for v, p in zip(self.flat.split(sizes), parameters, strict=True)]

    def collect(self) -> Tensor:
        """Make every gradient a view of the flat tensor, and return that tensor.

        Autograd adds to a gradient in place, so most are views already. A gradient for which it made a new
        tensor is copied in.
        """
        separate = [
            (view, p, p.grad)
            for view, p in zip(self.views, self.parameters, strict=True)
            if p.grad is not None and p.grad is not view
        ]
        if separate:
            comm.check_dense([gradient for _, _, gradient in separate], "gradients of a bucket")
            torch._foreach_copy_([view for view, _, _ in separate], [gradient for _, _, gradient in separate])
        for view, p, _ in separate:
            p.grad = view
        return self.flat

    def clear(self) -> None:
        """Zero the gradients and give them to the parameters, for the next backward pass to add to."""
        self.flat.zero_()
        for view, p in zip(self.views, self.parameters, strict=True):
            p.grad = view


class DDPBucketed(DDP):
    """`DDP` with gradients in flat buckets of at most bucket_size_mb (in 2^20 bytes), each sent when it is full.

    Autograd adds to the buckets in place, so nothing is copied as long as this module's `zero_grad` clears the
    gradients. An optimizer's own `zero_grad` drops them, which costs a copy of each. After the first step the buckets
    are cut again, in the order in which gradients come. A gradient that was replaced by hand counts as missing unless a
    backward pass reached its parameter. A parameter that no rank has used has no gradient, rather than zeros.

    Raises ValueError if bucket_size_mb is not above 0 and finite.
    """

    def __init__(self, module: nn.Module, bucket_size_mb: float = 100.0, grad_dtype: torch.dtype | None = None) -> None:
        self._kept: set[nn.Parameter] = set()  # parameters with gradients of finished steps, not yet cleared
        super().__init__(module, grad_dtype, bucket_size_mb)

    def _build_buckets(self) -> None:
        super()._build_buckets()
        self._flat_buckets: list[FlatBucket] = []  # made once the gradients of the step before are no longer needed

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._flat_buckets:
            self._make_flat_buckets()
        return super().forward(*inputs, **kwargs)

    def _make_flat_buckets(self) -> None:
        with torch.inference_mode(False):  # a gradient cannot be a view of an inference tensor
            self._flat_buckets = [FlatBucket(bucket) for bucket in self._buckets]
        for bucket in self._flat_buckets:
            bucket.collect()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. They stay views of the buckets; set_to_none is ignored."""
        super().zero_grad()
        self._kept.clear()
        if not self._flat_buckets:
            self._make_flat_buckets()
        for bucket in self._flat_buckets:
            bucket.clear()

    def _is_missing(self, p: nn.Parameter) -> bool:
        # A gradient that is not None may be a view that is still zero.
        return p.grad is None or (p not in self._reached and p not in self._kept)

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        self._kept = {p for p in self.trainable() if p.grad is not None}

    def _tensors_to_send(self, bucket: list[nn.Parameter]) -> list[Tensor]:
        if not self._flat_buckets:  # a step without a forward pass
            self._make_flat_buckets()
        return [self._flat_buckets[self._bucket_of[bucket[0]]].collect()]
