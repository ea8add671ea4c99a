"""Broadcast buckets of the sharded optimizer: parameters that are updated and sent together."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from . import comm
from .zero1_checks import describe

_ALIGNMENT = 512  # bytes: the alignment of PyTorch's GPU allocator; kernels choose their loads by it


class BroadcastBucket:
    """A share of each rank's parameters, in rank order, which that rank updates and then broadcasts.

    A share is one flat tensor per dtype, so that it is one transfer, and its parameters are views of it, their slots.
    """

    def __init__(self, shares: Sequence[list[Tensor]], groups: list[dict[str, Any]], immovable: set[Tensor]) -> None:
        mine = set(shares[comm.rank()])
        self.own = [[p for p in group["params"] if p in mine] for group in groups]
        self.slots: list[tuple[Tensor, Tensor]] = []
        self.moved: list[tuple[Tensor, Tensor]] = []  # parameters that are no longer in their slots
        self._addresses: list[int] = []
        self._immovable: list[tuple[Tensor, str]] = []
        self._sent: list[tuple[Tensor, int]] = []
        for owner, share in enumerate(shares):
            self._sent += [(p, owner) for p in share if p in immovable]
            self._immovable += [(p, describe(p)) for p in share if p in immovable and comm.world_size() > 1]
            movable = [p for p in share if p not in immovable]
            for dtype in dict.fromkeys(p.dtype for p in movable):
                self._sent.append((self._flatten([p for p in movable if p.dtype == dtype]), owner))

    def _flatten(self, parameters: list[Tensor]) -> Tensor:
        """Move parameters into one flat tensor."""
        unit = _ALIGNMENT // parameters[0].itemsize
        *starts, size = accumulate((-(-p.numel() // unit) * unit for p in parameters), initial=0)
        flat = parameters[0].detach().new_zeros(size)
        for p, start in zip(parameters, starts, strict=True):
            slot = flat[start : start + p.numel()].view(p.shape)
            p.data = slot.copy_(p.detach())  # frees its old memory, so that at most this share exists twice
            self.slots.append((p, slot))
            self._addresses.append(p.data_ptr())
        return flat

    def refresh_moved(self) -> list[Tensor]:
        """Update and return the parameters that have left their slots.

        Raises ValueError if one has changed its shape or dtype.
        """
        for p, was in self._immovable:
            _check_same_kind(was, describe(p))
        self.moved = []
        if [p.data_ptr() for p, _ in self.slots] != self._addresses:  # rarely true, and host time is short here
            self.moved = [(p, slot) for p, slot in self.slots if p.data_ptr() != slot.data_ptr()]
        for p, slot in self.moved:
            _check_same_kind(*(f"{t.dtype} {tuple(t.shape)}" for t in (slot, p)))
        return [p for p, _ in self.moved]

    def prepare_to_send(self) -> list[tuple[Tensor, int]]:
        """Copy moved parameters into their slots. Returns the tensors to send, each with its owner.

        They do not depend on any later `p.data = ...` or `module.to`.
        """
        for p, slot in self.moved:
            slot.copy_(p)
        return [(tensor.detach(), owner) for tensor, owner in self._sent]


def _check_same_kind(was: str, now: str) -> None:
    if was.removeprefix("frozen ") != now.removeprefix("frozen "):
        raise ValueError(f"a parameter was {was} and is {now}: it needs a new optimizer")


def cut(parameters: list[Tensor], limit: float) -> list[list[Tensor]]:
    """Cut a rank's parameters into consecutive shares of at most `limit` bytes, or of a single parameter."""
    shares: list[list[Tensor]] = []
    filled = 0
    for p in parameters:
        if not shares or filled + p.nbytes > limit:
            shares.append([])
            filled = 0
        shares[-1].append(p)
        filled += -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT
    return shares


def find_immovable(parameters: list[Tensor]) -> set[Tensor]:
    """Parameters that are, on any rank, a view of memory that something else may hold; with one rank, all.

    All ranks call it together.
    """
    stay = [comm.world_size() == 1 or not p.numel() or p.untyped_storage().nbytes() != p.nbytes for p in parameters]
    everyone = comm.gather_objects(stay, "which parameters stay where they are")
    return {p for p, *flags in zip(parameters, *everyone, strict=True) if any(flags)}
