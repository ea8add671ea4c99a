"""Broadcast buckets of the sharded optimizer: parameters that are updated and sent together."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..machine.flat import ALIGNMENT, flatten
from . import comm


class BroadcastBucket:
    """A share of each rank's parameters, in rank order, which that rank updates and then broadcasts.

    A share is one flat tensor per dtype, so that it is one transfer, and its parameters are views of it. Those that may
    not move (packed ones, for instance) are sent one by one. A single rank moves and sends nothing.
    """

    def __init__(self, shares: Sequence[list[Tensor]], groups: list[dict[str, Any]], immovable: set[Tensor]) -> None:
        mine = set(shares[comm.rank()])
        self.own = [[p for p in group["params"] if p in mine] for group in groups]  # by parameter group
        self.sent: list[tuple[Tensor, int]] = []  # each with its owner
        self._addresses: list[tuple[Tensor, int]] = []
        for owner, share in enumerate(shares) if comm.world_size() > 1 else ():
            self.sent += [(p.detach(), owner) for p in share if p in immovable]
            movable = [p for p in share if p not in immovable]
            for dtype in dict.fromkeys(p.dtype for p in movable):
                self.sent.append((flatten([p for p in movable if p.dtype == dtype]), owner))
            self._addresses += [(p, p.data_ptr()) for p in share]

    def check_addresses(self) -> None:
        """Raise ValueError if a parameter has left the memory that is sent."""
        for p, address in self._addresses:
            if p.data_ptr() != address:
                raise ValueError(f"the memory of a parameter of shape {tuple(p.shape)} was replaced (by `p.data = ...` "
                                 "or `module.to(...)`): it needs a new optimizer")  # fmt: skip


def cut(parameters: list[Tensor], limit: float) -> list[list[Tensor]]:
    """Cut a rank's parameters into consecutive shares of at most `limit` bytes, or of a single parameter."""
    shares: list[list[Tensor]] = []
    filled = 0
    for p in parameters:
        if not shares or filled + p.nbytes > limit:
            shares.append([])
            filled = 0
        shares[-1].append(p)
        filled += -(-p.nbytes // ALIGNMENT) * ALIGNMENT
    return shares


def find_immovable(parameters: list[Tensor]) -> set[Tensor]:
    """Parameters that are, on any rank, a view of memory that something else may hold. All ranks call it together."""
    stay = [not p.numel() or p.untyped_storage().nbytes() != p.nbytes for p in parameters]
    everyone = comm.all_gather_objects(stay, "which parameters stay where they are")
    return {p for p, *flags in zip(parameters, *everyone, strict=True) if any(flags)}
