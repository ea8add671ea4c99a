"""Checks that a sharded optimizer can send its parameters."""

from torch import Tensor

from . import comm
from .strategy import is_shard


def check_parameters(parameters: list[Tensor]) -> None:
    """Raise ValueError if a parameter differs between ranks or cannot be sent. All ranks call it together."""
    # Differences first, so that all ranks raise together.
    kinds = {f"parameter {i}": describe(p) for i, p in enumerate(parameters)}
    comm.check_same(kinds, "parameters in the optimizer")
    for i, p in enumerate(parameters if comm.world_size() > 1 else []):
        if is_shard(p):
            raise ValueError(f"parameter {i} is {describe(p)}, this rank's part of a sharded one: it must be whole; "
                             "for parts, an ordinary optimizer keeps only their part of the state")  # fmt: skip
        if not p.is_contiguous() or p.device != parameters[0].device or p.is_meta:
            raise ValueError(f"parameter {i} is {describe(p)}, parameter 0 on {parameters[0].device.type}: "
                             "only contiguous ones on one device can be sent")  # fmt: skip


def describe(p: Tensor) -> str:
    """The properties of a parameter in which the ranks must agree."""
    frozen, dtype = "" if p.requires_grad else "frozen ", str(p.dtype).removeprefix("torch.")
    strides = "" if p.is_contiguous() else f" of strides {p.stride()}"
    return f"{frozen}{dtype} {tuple(p.shape)}{strides} on {p.device.type}"
