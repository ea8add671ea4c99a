"""ZeRO stage 1: each rank keeps the optimizer state of a part of the parameters, updates it, and sends it to all.

Rajbhandari et al. 2020, "ZeRO: Memory optimizations toward training trillion parameter models", section 5.1. AdamW in
float32 holds 8 bytes per parameter; with N ranks each rank holds 8 / N.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import comm
from .strategy import is_part

# By arithmetic, for xl (2 * 10^9 parameters in float32) on two H200: a rank updates 4 GB in 7 ms (28 bytes per
# parameter at 4 TB/s) and sends them in 13 ms (at 300 GB/s). Two things are not hidden: the first round's update, 1 ms
# at 512 MB, and the host, where a round takes it longer than the transfer does: 1 ms, if it is slow, compared with 0.9
# ms for 256 MB and 1.8 ms for 512 MB.
TRANSFER_MB = 512
_ALIGNMENT = 512  # bytes: the alignment of PyTorch's GPU allocator; kernels choose their loads by it


class ShardedOptimizer(Optimizer):
    """`optimizer_cls(params, **kwargs)` with its state sharded over ranks; the updates are the same to the last bit.

    Any optimizer works that updates each parameter from its own gradient and state alone. Whole parameters are assigned
    to ranks (`owner_of`), so that the element counts of two ranks differ by at most the size of the largest parameter.
    Frozen parameters are assigned at the first step after they are thawed; until then all ranks keep the state that is
    loaded for them.

    `step` goes in rounds. In each round, every rank updates a piece of its part: at most `transfer_mb` times 2^20
    bytes, or a single parameter. While it updates the next piece, the pieces of all ranks are sent together. All ranks
    must have equal parameters and gradients beforehand, and must call `step`, `add_param_group` and
    `consolidate_state_dict` together.

    With more than one rank, parameters are moved when they are assigned: those of a piece into one flat tensor per
    dtype, which is one transfer (and what torch.save of any of them saves). They stay the same objects. Anything that
    knows their addresses, as a CUDA graph does, or shares their memory, as a state dict does, must be made afterwards.
    A parameter that lies in a larger storage on any rank stays there and is sent by itself.

    `param_groups` hold all parameters, and changes to them take effect, so a scheduler sees an ordinary optimizer.
    `state`, and so `state_dict`, hold this rank's own part.

    Raises ValueError if optimizer_cls is not an optimizer, or if the parameters are not the same on all ranks or cannot
    be sent.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_cls: type[Optimizer], *, transfer_mb: float = TRANSFER_MB, **kwargs: Any
    ) -> None:
        if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
            raise ValueError(f"optimizer_cls is {optimizer_cls!r}: it must be a class of torch.optim.Optimizer's kind")
        if not transfer_mb > 0:
            raise ValueError(f"transfer_mb is {transfer_mb}: it must be above 0")
        self._optimizer_cls, self._kwargs = optimizer_cls, kwargs
        self._transfer_bytes = transfer_mb * 2**20 if comm.world_size() > 1 else float("inf")
        self._inner: Optimizer | None = None
        self._owners: dict[Tensor, int] = {}
        self._unassigned: list[Tensor] = []
        self._rounds: list[_Round] = []
        super().__init__(params, {})
        self._assign()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy.deepcopy and torch.save call this too. A copy would send parameters that its model does not have.
        raise TypeError("a ShardedOptimizer cannot be copied or pickled: its state_dict can, and what "
                        "consolidate_state_dict gives")  # fmt: skip

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and assign them to ranks like the first ones. Those stay where they are."""
        super().add_param_group(param_group)
        if self._inner is not None:  # otherwise called by the constructor, which assigns all groups itself
            try:
                self._assign()
            except Exception:
                self.param_groups.pop()
                raise

    def owner_of(self, parameter: Tensor) -> int | None:
        """The rank with a parameter's state, None for one still frozen. Raises ValueError for an unknown parameter."""
        if parameter not in self._owners and not any(parameter is p for p in self._unassigned):
            raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is none of this optimizer's")
        return self._owners.get(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update all parameters. Evaluates the closure once and returns its loss; passes kwargs on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.requires_grad for p in self._unassigned):
            self._assign()
        assert self._inner is not None
        self._find_strays()
        self._inner.state = self.state
        transfers = []
        for i, each in enumerate(self._rounds):
            groups = zip(self.param_groups, each.own, strict=False)  # a round has nothing of groups added after it
            self._inner.param_groups = [{**group, "params": own} for group, own in groups if own]
            if self._inner.param_groups:
                self._inner.step(**kwargs)
            # Parameters without a gradient here are sent too: all ranks must start the same transfers.
            transfers.append(comm.start_broadcasts(each.sources(), f"updated parameters, round {i + 1}"))
        for each, transfer in zip(self._rounds, transfers, strict=True):
            transfer.wait()
            for p, place in each.strays:
                p.copy_(place)
        return loss

    def _find_strays(self) -> None:
        """Find parameters that were moved since, and ensure that none lies where another one is or will be put."""
        strays = [p for each in self._rounds for p in each.find_strays()]
        if not strays:
            return
        at: dict[int, Tensor] = {}
        for p in filter(Tensor.numel, dict.fromkeys(self._parameters())):
            if at.setdefault(p.data_ptr(), p) is not p:
                shapes = " and ".join(str(tuple(x.shape)) for x in (at[p.data_ptr()], p))
                raise ValueError(f"parameters of shapes {shapes} share memory by now: each is to have its own")
        pieces = {place.untyped_storage().data_ptr() for each in self._rounds for _, place in each.places}
        inside = [p for p in strays if p.untyped_storage().data_ptr() in pieces]
        for p, values in zip(inside, [p.detach().clone() for p in inside], strict=True):
            p.data = values

    def consolidate_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """The state dict that `optimizer_cls` in one process would have, on the CPU of rank `to`; None elsewhere.

        All ranks call it together. Raises ValueError if there is no such rank.
        """
        if not 0 <= to < comm.world_size():
            raise ValueError(f"to is {to}: there are ranks 0 to {comm.world_size() - 1}")
        parameters = self._parameters()
        # For a parameter that has no owner yet, all ranks have what was loaded, and rank 0 reports it.
        told = [p in self.state and self._owners.get(p, 0) == comm.rank() for p in parameters]
        own = {i: self.state[p] for i, p in enumerate(parameters) if told[i]}
        outlines = {i: {k: _outline(v, parameters[i]) for k, v in state.items()} for i, state in own.items()}
        everyone = comm.gather_objects(outlines, "outline of the optimizer's state")
        merged = {i: (state, owner) for owner, part in enumerate(everyone) for i, state in part.items()}
        full: dict[int, dict[str, Any]] = {}
        for i in sorted(merged):
            full[i], owner = merged[i]
            for key, value in full[i].items():
                if isinstance(value, Tensor) and value.is_meta:
                    mine, device = owner == comm.rank(), parameters[i].device
                    tensor = own[i][key].contiguous() if mine else torch.empty_like(value, device=device)
                    comm.start_broadcasts([(tensor, owner)], "state of the optimizer").wait()
                    if to == comm.rank():
                        full[i][key] = tensor.to("cpu", copy=True)
        groups = self.state_dict()["param_groups"]
        return {"state": full, "param_groups": groups} if to == comm.rank() else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's own part of a state dict, which may be a full one or hold only that part.

        It may come from `consolidate_state_dict`, from `optimizer_cls` in one process, or from `state_dict` on this
        rank. Raises ValueError if its groups do not match those of this optimizer.
        """
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        rank = comm.rank()
        own = {name for name, p in zip(names, self._parameters(), strict=False) if self._owners.get(p, rank) == rank}
        state = {name: state for name, state in state_dict["state"].items() if name in own}
        super().load_state_dict({**state_dict, "state": state})
        assert self._inner is not None
        # Not just an assignment: in __setstate__ optimizers repair what older versions of them have saved.
        self._inner.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _assign(self) -> None:
        """Assign an owner to each parameter that is not frozen and has none, and add the rounds that send them."""
        parameters = list(dict.fromkeys(self._parameters()))
        _check(parameters)
        owners = dict(self._owners)
        loads = [0] * comm.world_size()
        for p, owner in owners.items():
            loads[owner] += p.numel()
        # Greedy: the rank with the fewest elements gets the next parameter, so no rank is ahead by more than the last
        # parameter it got. The largest go first, so that this is small.
        new = [p for p in parameters if p.requires_grad and p not in owners]
        for p in sorted(new, key=Tensor.numel, reverse=True):
            owners[p] = loads.index(min(loads))
            loads[owners[p]] += p.numel()
        self._make_state({p for p in new if owners[p] == comm.rank()})
        immovable = _immovable(new)
        parts = [_cut([p for p in new if owners[p] == rank], self._transfer_bytes) for rank in range(comm.world_size())]
        self._rounds += [_Round(each, self.param_groups, immovable) for each in zip_longest(*parts, fillvalue=[])]
        for p in new:
            if owners[p] != comm.rank():
                self.state.pop(p, None)
        self._owners = owners
        self._unassigned = [p for p in parameters if p not in owners]

    def _make_state(self, new: set[Tensor]) -> None:
        """Make an optimizer over this rank's new parameters: the first steps, later ones give only initial state."""
        groups = [{**group, "params": [p for p in group["params"] if p in new]} for group in self.param_groups]
        made = self._optimizer_cls(groups, **self._kwargs)
        if self._inner is None:
            self._inner, self.state, self.defaults = made, made.state, made.defaults
            for group, with_defaults in zip(self.param_groups, made.param_groups, strict=True):
                for key, value in with_defaults.items():
                    group.setdefault(key, value)
        else:  # some optimizers create state on construction; state loaded while frozen stays
            self.state.update({p: state for p, state in made.state.items() if p not in self.state})


class _Round:
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


def _cut(part: list[Tensor], limit: float) -> list[list[Tensor]]:
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


def _immovable(parameters: list[Tensor]) -> set[Tensor]:
    """Parameters that are, on any rank, a view of memory that something else may hold; with one rank, all."""
    stay = [comm.world_size() == 1 or not p.numel() or p.untyped_storage().nbytes() != p.nbytes for p in parameters]
    everyone = comm.gather_objects(stay, "which parameters stay where they are")
    return {p for p, *flags in zip(parameters, *everyone, strict=True) if any(flags)}


def _check(parameters: list[Tensor]) -> None:
    """Raise ValueError if a parameter differs between ranks or cannot be sent."""
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


def _outline(value: Any, parameter: Tensor) -> Any:
    """What to send first of a state value: a small value itself; of a large one, what a rank needs to receive it."""
    if not isinstance(value, Tensor):
        return value
    large = value.ndim > 0 and value.device == parameter.device
    return value.detach().to("meta" if large else "cpu", copy=True)
