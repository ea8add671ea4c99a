"""What fully sharded training sends: weights that are gathered together, and their gradients on the way back.

`fsdp.py` says when, and where the method comes from.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cs336_basics.model import Embedding, Linear

from . import comm
from .strategy import mark_as_part

EMBEDDINGS = (Embedding, nn.Embedding)
SHARDED = (Linear, nn.Linear, *EMBEDDINGS)


class Memory:
    """Tensors on one storage, which has memory at first, and then only from `take` to `give_back`; the tensors stay."""

    ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns on GPUs

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [-(-shape.numel() * dtype.itemsize // self.ALIGNMENT) * self.ALIGNMENT for shape in shapes]
        sizes[-1] = shapes[-1].numel() * dtype.itemsize  # the last needs no padding
        parts = torch.empty(sum(sizes) // dtype.itemsize, dtype=dtype, device=device).split(
            [size // dtype.itemsize for size in sizes]
        )
        self.tensors = [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._storage, self.nbytes = parts[0].untyped_storage(), sum(sizes)

    def take(self) -> None:
        self._storage.resize_(self.nbytes)

    def give_back(self) -> None:
        self._storage.resize_(0)

    def is_there(self) -> bool:
        return self._storage.nbytes() > 0


class Parcel:
    """What is sent for tensors like these: in one dtype, and in shapes that may be padded behind their rows.

    Tensors are sent as they are if all have that shape and dtype, and otherwise as copies, which one kernel makes.
    """

    def __init__(self, like: Sequence[Tensor], shapes: Sequence[torch.Size], dtype: torch.dtype) -> None:
        self._copies: Memory | None = None
        if any(t.shape != shape or t.dtype != dtype for t, shape in zip(like, shapes, strict=True)):
            self._copies = Memory(shapes, dtype, like[0].device)
            self._rows = [copy[: len(t)] for copy, t in zip(self._copies.tensors, like, strict=True)]
            self._copies.give_back()

    def pack(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._copies is None:
            return [t.detach().contiguous() for t in tensors]
        self._copies.take()
        with torch.no_grad():
            torch._foreach_copy_(self._rows, tensors)
        return self._copies.tensors

    def give_back(self) -> None:
        if self._copies is not None:
            self._copies.give_back()


WHOLE, PART, APART = range(3)
"""What modules may have in place of a weight: all of it, this rank's shard, or an `Apart`, which must not be used."""


class Apart(Tensor):
    """Stands for a weight while it is not whole. Using it raises RuntimeError: a shard would give wrong numbers."""

    weight_name: str
    _HARMLESS: ClassVar = {Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__}  # type: ignore

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in cls._HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        names = [x.weight_name for x in tree_leaves((args, kwargs)) if isinstance(x, Apart)]
        raise RuntimeError(
            f"{names[0]} was used outside of the calls of its module, where fsdp has a part of it only: share the "
            "parameter between modules and call them, or take another strategy"
        )


class Weight:
    """One weight: this rank's rows, and the whole weight, whose memory exists only while it is needed."""

    full: nn.Parameter

    def __init__(self, parameter: nn.Parameter, name: str, owners: list[tuple[dict[str, Any], str]]) -> None:
        self.shard, self.owners = parameter, owners  # owners: the modules' dicts of parameters, and its name in each
        self.shape, self.used = parameter.shape, False
        rows, world_size = self.shape[0], comm.world_size()
        self.piece = torch.Size((-(-rows // world_size), *self.shape[1:]))  # per rank, padded where it has fewer rows
        self.padded = torch.Size((world_size * self.piece[0], *self.shape[1:]))
        self.first_row = min(comm.rank() * self.piece[0], rows)
        parameter.grad = None
        mark_as_part(parameter)
        parameter.data = parameter.data[self.first_row : self.first_row + self.piece[0]]  # its unit copies them
        self.apart = torch.empty(0, dtype=parameter.dtype, device=parameter.device).as_subclass(Apart)
        self.apart.weight_name = name

    def lay(self, room: Tensor) -> None:
        """Let the whole weight lie on this tensor's memory."""
        # Two tensors on one memory: writing into `room` does not count as a change of `full`, which autograd has saved
        # for backward and expects to find unchanged.
        self.full = nn.Parameter(room.data[: self.shape[0]], requires_grad=self.shard.requires_grad)


class Unit:
    """Weights that are sent together, in one transfer straight to and from where they are used.

    The gathered rows of all ranks are the weight, and rows of a gradient are sent to their rank from where they lie in
    it. Weights are not copied, except to change the dtype or where the rows do not divide by the number of ranks; the
    received part of a gradient is copied once, into the memory of the shard's gradient.
    What every step needs is made here once, because the host must be faster than the GPU.
    """

    def __init__(
        self, name: str, weights: list[Weight], dtype: torch.dtype, grad_dtype: torch.dtype | None = None
    ) -> None:
        self.name, self.weights = name, weights
        self._waiting = f"wait for gather of {name}"
        device = weights[0].shard.device
        self._shards: list[Tensor] = [w.shard for w in weights]
        # The shards share one memory, because behind each separate tensor the GPU's allocator may keep up to 1 MB.
        together = Memory([shard.shape for shard in self._shards], self._shards[0].dtype, device)
        for shard, place in zip(self._shards, together.tensors, strict=True):
            shard.data = place.copy_(shard.data)
        self.whole = Memory([w.padded for w in weights], dtype, device)
        for weight, room in zip(weights, self.whole.tensors, strict=True):
            weight.lay(room)
        self.whole.give_back()
        self._places = [(parameters, key, (w.full, w.shard, w.apart)) for w in weights for parameters, key in w.owners]
        self._registered = PART
        self._pieces = Parcel(self._shards, [w.piece for w in weights], dtype)
        self._present = False  # whole, or being gathered
        self._gather: comm.Transfer | None = None
        self._scatter: tuple[comm.Transfer, list[Tensor]] | None = None
        self.trainable = [w for w in weights if w.full.requires_grad]
        if self.trainable:
            self._gradients = Parcel(
                [w.full for w in self.trainable], [w.padded for w in self.trainable], grad_dtype or dtype
            )
            self._got = Memory([w.piece for w in self.trainable], grad_dtype or dtype, device)
            self._mine = [got[: len(w.shard)] for got, w in zip(self._got.tensors, self.trainable, strict=True)]
            self._got.give_back()
        self.forget()

    def forget(self) -> None:
        """Return to the state before the first backward."""
        self.arrived, self.scattered = 0, False
        for weight in self.trainable:
            weight.full.grad = None

    def register(self, what: int) -> None:
        """Give the modules the weights WHOLE, this rank's PART of them, or what is APART."""
        if what != self._registered:
            self._registered = what
            for parameters, name, three in self._places:
                parameters[name] = three[what]

    def start_gather(self) -> None:
        if self._present:
            return
        self._present = True
        self.whole.take()
        sent = self._pieces.pack(self._shards)
        self._gather = comm.start_gather(self.whole.tensors, sent, f"gather of {self.name}")

    def wait_gather(self) -> None:
        if self._gather is not None:
            with torch._C._profiler._RecordFunctionFast(self._waiting):
                self._gather.wait()
            self._gather = None
            self._pieces.give_back()

    def free(self) -> None:
        """Free the memory of the whole weights. The tensors stay, because autograd has saved them."""
        if self._present:
            self.wait_gather()
            if self._registered == WHOLE:
                self.register(PART)
            self.whole.give_back()
            self._present = False

    def start_scatter(self) -> None:
        """Take the gradients off the whole weights and send each rank its rows; zeros where there is no gradient."""
        gradients = []
        for weight in self.trainable:
            gradient = weight.full.grad
            gradients.append(torch.zeros_like(weight.full) if gradient is None else gradient)
            weight.full.grad = None
        sent = self._gradients.pack(gradients)
        self._got.take()
        self._scatter = comm.start_scatter_mean(self._got.tensors, sent, f"scatter of {self.name}"), sent
        self.arrived, self.scattered = 0, True

    def wait_scatter(self) -> None:
        """Add the rows that were received to the gradients of the shards."""
        if self._scatter is None:
            return
        self._scatter[0].wait()
        self._scatter = None  # also drops what was sent
        self._gradients.give_back()
        new = [torch.empty_like(w.shard) for w in self.trainable]
        torch._foreach_copy_(new, self._mine)
        self._got.give_back()
        for weight, gradient in zip(self.trainable, new, strict=True):
            shard = weight.shard
            if shard.grad is None:
                shard.grad = gradient
            else:
                shard.grad.add_(gradient)

    def drop_scatter(self) -> None:
        """Discard gradients that are being sent."""
        if self._scatter is not None:
            self._scatter[0].wait()
            self._scatter = None
            self._gradients.give_back()
            self._got.give_back()

    def gather_masters(self, keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        """Map each shard to what `keep` returns for its whole weight, in the dtype of the shard."""
        rooms = [w.shard.new_empty(w.padded) for w in self.weights]
        parcel = Parcel(self._shards, [w.piece for w in self.weights], self._shards[0].dtype)
        comm.start_gather(rooms, parcel.pack(self._shards), f"gather of all of {self.name}").wait()
        return {w.shard: keep(room[: w.shape[0]]) for room, w in zip(rooms, self.weights, strict=True)}


class Stage:
    """A module whose calls need the weights of units to be whole: a block, or a single Linear or Embedding.

    It has one unit, or more if some of its weights are shared with other stages or have another dtype.
    """

    def __init__(self, name: str, module: nn.Module, units: list[Unit]) -> None:
        self.name, self.module, self.units = name, module, units
        self.began = 0  # autograd's counter of operations when it was last called
        self.trains = any(p.requires_grad for p in module.parameters())

    def start(self) -> None:
        for unit in self.units:
            unit.start_gather()

    def wait(self) -> None:
        for unit in self.units:
            unit.wait_gather()

    def register(self, what: int) -> None:
        for unit in self.units:
            unit.register(what)

    def free(self, keep: Container[Unit]) -> None:
        for unit in self.units:
            if unit not in keep:
                unit.free()


def divide(module: nn.Module, compute_dtype: torch.dtype | None, grad_dtype: torch.dtype | None) -> list[Stage]:
    """Shard the weights of a module; return its stages in the order in which they are registered."""
    sharded: dict[nn.Parameter, list[tuple[dict[str, Any], str]]] = {}  # each with where modules have it
    for child in module.modules():
        weight = child._parameters.get("weight") if isinstance(child, SHARDED) else None
        if weight is not None and weight.numel():
            sharded[weight] = []
    for child in module.modules():  # any other module may share it
        for name, parameter in child._parameters.items():
            if parameter in sharded:
                sharded[parameter].append((child._parameters, name))
    found = dict.fromkeys(_find_stages(module, sharded))
    modules = [stage for stage in found if any(p in sharded for p in stage.parameters())]
    users: dict[nn.Parameter, list[int]] = {p: [] for p in sharded}
    for number, stage in enumerate(modules):
        for p in stage.parameters():
            if p in sharded:
                users[p].append(number)
    # Weights that the same stages use form a unit. As a rule that is one stage; for tied weights it is all stages that
    # share them.
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for p in sharded:
        groups.setdefault((tuple(users[p]), p.dtype), []).append(p)
    names = {child: name for name, child in module.named_modules()}
    parameter_names = {p: name for name, p in module.named_parameters()}
    units: list[list[Unit]] = [[] for _ in modules]
    for (numbers, dtype), parameters in groups.items():
        weights = [Weight(p, parameter_names[p], sharded[p]) for p in parameters]
        name = " and ".join(names[modules[number]] for number in numbers)
        unit = Unit(name, weights, compute_dtype or dtype, grad_dtype)
        for number in numbers:
            units[number].append(unit)
    return [Stage(names[stage], stage, its) for stage, its in zip(modules, units, strict=True)]


def _find_stages(module: nn.Module, sharded: Container[nn.Parameter], in_list: bool = False) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # these are never called themselves
        in_list = in_list or isinstance(module, nn.ModuleList)
    elif in_list or any(p in sharded for p in module._parameters.values() if p is not None):
        return [module]
    return [stage for child in module.children() for stage in _find_stages(child, sharded, in_list)]
