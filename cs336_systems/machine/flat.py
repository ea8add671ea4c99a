"""Parameters side by side in one tensor."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

ALIGNMENT = 512
"""Bytes: the alignment of PyTorch's GPU allocator. Kernels choose their loads by it."""


def flatten(parameters: Sequence[Tensor]) -> Tensor:
    """Move parameters of one dtype into a flat tensor, in order, each at a multiple of ALIGNMENT; return the tensor."""
    unit = ALIGNMENT // parameters[0].itemsize
    *starts, size = accumulate((-(-p.numel() // unit) * unit for p in parameters), initial=0)
    flat = parameters[0].detach().new_zeros(size)
    for p, start in zip(parameters, starts, strict=True):
        p.data = flat[start : start + p.numel()].view(p.shape).copy_(p.detach())  # at most these exist twice
    return flat
