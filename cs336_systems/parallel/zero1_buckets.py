"""What the sharded optimizer sends in one round, and where the parameters of a round lie.

Each piece of a round is one flat tensor per dtype, so that it is one transfer, and its parameters are views of it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from . import comm
from .strategy import is_part

_ALIGNMENT = 512  # bytes: the alignment of PyTorch's GPU allocator; kernels choose their loads by it


class Round:
    """One round: a piece of each rank's part, in rank order, which its rank updates and then sends."""

    def __init__(self, pieces: Sequence[list[Tensor]], groups: list[dict[str, Any]], immovable: set[Tensor]) -> None:
        mine = set(pieces[comm.rank()])
        self.own = [[p for p in group["params"] if p in mine] for group in groups]
        self._sent: list[tuple[Tensor, int]] = []
        self._unmoved: list[tuple[Tensor, str]] = []
        self.places: list[tuple[Tensor, Tensor]] = []
        self._addresses: list[int] = []
        self.strays: list[tuple[Tensor, Tensor]] = []
        for owner, piece in enumerate(pieces):
            self._sent += [(p, owner) for p in piece if p in immovable]
            self._unmoved += [(p, _describe(p)) for p in piece if p in immovable and comm.world_size() > 1]
            movable = [p for p in piece if p not in immovable]
            for dtype in dict.fromkeys(p.dtype for p in movable):
                self._sent.append((self._move([p for p in movable if p.dtype == dtype]), owner))

    def _move(self, parameters: list[Tensor]) -> Tensor:
        unit = _ALIGNMENT // parameters[0].itemsize
        *starts, size = accumulate((-(-p.numel() // unit) * unit for p in parameters), initial=0)
        flat = parameters[0].detach().new_zeros(size)
        for p, start in zip(parameters, starts, strict=True):
            place = flat[start : start + p.numel()].view(p.shape)
            p.data = place.copy_(p.detach())  # frees its old memory, so that at most this piece exists twice
            self.places.append((p, place))
            self._addresses.append(p.data_ptr())
        return flat

    def find_strays(self) -> list[Tensor]:
        """Parameters that have left their place. Raises ValueError if one is not what the other ranks expect."""
        for p, was in self._unmoved:
            _check_same_kind(was, _describe(p))
        self.strays = []
        if [p.data_ptr() for p, _ in self.places] != self._addresses:  # rarely true, and host time is short here
            self.strays = [(p, place) for p, place in self.places if p.data_ptr() != place.data_ptr()]
        for p, place in self.strays:
            _check_same_kind(*(f"{t.dtype} {tuple(t.shape)}" for t in (place, p)))
        return [p for p, _ in self.strays]

    def sources(self) -> list[tuple[Tensor, int]]:
        """The tensors to send, each with its owner. They do not depend on any later `p.data = ...` or `module.to`."""
        for p, place in self.strays:
            place.copy_(p)
        return [(tensor.detach(), owner) for tensor, owner in self._sent]


def _check_same_kind(was: str, now: str) -> None:
    if was.removeprefix("frozen ") != now.removeprefix("frozen "):
        raise ValueError(f"a parameter was {was} and is {now}: it needs a new optimizer")


def cut(part: list[Tensor], limit: float) -> list[list[Tensor]]:
    """Cut a part into consecutive pieces of at most `limit` bytes, or of a single tensor."""
    pieces: list[list[Tensor]] = []
    filled = 0
    for p in part:
        if not pieces or filled + p.nbytes > limit:
            pieces.append([])
            filled = 0
        pieces[-1].append(p)
        filled += -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT
    return pieces


def find_immovable(parameters: list[Tensor]) -> set[Tensor]:
    """Parameters that are, on any rank, a view of memory that something else may hold; with one rank, all.

    All ranks call it together.
    """
    stay = [comm.world_size() == 1 or not p.numel() or p.untyped_storage().nbytes() != p.nbytes for p in parameters]
    everyone = comm.gather_objects(stay, "which parameters stay where they are")
    return {p for p, *flags in zip(parameters, *everyone, strict=True) if any(flags)}


def check_parameters(parameters: list[Tensor]) -> None:
    """Raise ValueError if a parameter differs between ranks or cannot be sent. All ranks call it together."""
    shared = _in_the_memory_of_others(parameters) if comm.world_size() > 1 else {}
    # Differences first, so that all ranks raise together.
    kinds = {
        f"parameter {i}": _describe(p) + (f" in the memory of parameter {shared[i]}" if i in shared else "")
        for i, p in enumerate(parameters)
    }
    comm.check_same(kinds, "parameters in the optimizer")
    for i, p in enumerate(parameters if comm.world_size() > 1 else []):
        if is_part(p):
            raise ValueError(f"parameter {i} is {_describe(p)}, this rank's part of a sharded one: only whole ones are "
                             "taken; of parts an ordinary optimizer has its part of the state alone")  # fmt: skip
        if not p.is_contiguous() or p.device != parameters[0].device or p.is_meta:
            raise ValueError(f"parameter {i} is {_describe(p)}, parameter 0 on {parameters[0].device.type}: "
                             "only contiguous ones on one device can be sent")  # fmt: skip
        if i in shared:
            raise ValueError(f"parameter {i} is in the memory of parameter {shared[i]}: each is kept by a rank of its "
                             "own; what is to be one has to be one object")  # fmt: skip


def _in_the_memory_of_others(parameters: list[Tensor]) -> dict[int, int]:
    """Parameters that share memory with an earlier one: their index -> the index of that one."""
    places = [(p.data_ptr(), i) for i, p in enumerate(parameters) if p.numel() and p.is_contiguous() and not p.is_meta]
    found: dict[int, int] = {}
    end, last = 0, 0
    for start, i in sorted(places):
        if start < end:
            found[max(i, last)] = min(i, last)
        if start + parameters[i].nbytes > end:
            end, last = start + parameters[i].nbytes, i
    return found


def _describe(p: Tensor) -> str:
    frozen, dtype = "" if p.requires_grad else "frozen ", str(p.dtype).removeprefix("torch.")
    strides = "" if p.is_contiguous() else f" of strides {p.stride()}"
    return f"{frozen}{dtype} {tuple(p.shape)}{strides} on {p.device.type}"
