"""Parameter groups of FSDP: weights that are all-gathered together, and their gradients, reduce-scattered together.

`fsdp.py` gives the overview and the papers; `fsdp_prefetch.py` decides when a group communicates.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from . import comm, peer_memory
from .fsdp_modules import Holders, find_fsdp_modules, find_weights
from .strategy import mark_as_shard


class ResizableBuffer:
    """Tensors on one storage that can release its memory and allocate it again, while the tensors stay."""

    def __init__(self, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [peer_memory.bytes_of([shape], dtype) for shape in shapes]
        sizes[-1] = shapes[-1].numel() * dtype.itemsize  # the last needs no padding
        parts = torch.empty(sum(sizes) // dtype.itemsize, dtype=dtype, device=device).split(
            [size // dtype.itemsize for size in sizes]
        )
        self.tensors = [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._storage, self.nbytes = parts[0].untyped_storage(), sum(sizes)

    def allocate(self) -> None:
        self._storage.resize_(self.nbytes)

    def release(self) -> None:
        self._storage.resize_(0)

    def is_allocated(self) -> bool:
        return self._storage.nbytes() > 0


class SendBuffer:
    """Input of a collective: tensors in one dtype, their rows padded to the given shapes.

    Tensors that have this dtype and shape already are sent from where they are. Otherwise one kernel copies them in.
    """

    def __init__(self, like: Sequence[Tensor], shapes: Sequence[torch.Size], dtype: torch.dtype) -> None:
        self._buffer: ResizableBuffer | None = None
        if any(t.shape != shape or t.dtype != dtype for t, shape in zip(like, shapes, strict=True)):
            self._buffer = ResizableBuffer(shapes, dtype, like[0].device)
            self._rows = [copy[: len(t)] for copy, t in zip(self._buffer.tensors, like, strict=True)]
            self._buffer.release()

    def copy_in(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._buffer is None:
            return [t.detach().contiguous() for t in tensors]
        self._buffer.allocate()
        with torch.no_grad():
            torch._foreach_copy_(self._rows, tensors)
        return self._buffer.tensors

    def release(self) -> None:
        if self._buffer is not None:
            self._buffer.release()


UNSHARDED, SHARDED, GUARDED = range(3)
"""States of a weight: modules hold the whole weight, this rank's shard, or a `ShardedGuard`."""


class ShardedGuard(Tensor):
    """Stands in for a sharded weight during the first forward pass.

    Using it raises RuntimeError, because a shard would give wrong numbers.
    """

    weight_name: str
    _HARMLESS: ClassVar = {Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__}  # type: ignore

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in cls._HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        names = [x.weight_name for x in tree_leaves((args, kwargs)) if isinstance(x, ShardedGuard)]
        raise RuntimeError(
            f"{names[0]} was used outside of the calls of its module, where fsdp has a part of it only: share the "
            "parameter between modules and call them, or take another strategy"
        )


class ShardedParam:
    """One weight: the parameter keeps this rank's rows, and `full` is the whole weight, in memory only when needed."""

    full: nn.Parameter  # set by the group, on its buffer

    def __init__(self, parameter: nn.Parameter, name: str, holders: Holders) -> None:
        self.shard, self.holders, self.shape, self.used = parameter, holders, parameter.shape, False
        rows, world_size = self.shape[0], comm.world_size()
        shard_rows = -(-rows // world_size)  # on each rank; the last ranks pad theirs
        self.shard_shape = torch.Size((shard_rows, *self.shape[1:]))
        self.padded_shape = torch.Size((world_size * shard_rows, *self.shape[1:]))
        self.first_row = min(comm.rank() * shard_rows, rows)
        parameter.grad = None
        mark_as_shard(parameter)
        parameter.data = parameter.data[self.first_row : self.first_row + shard_rows]  # the group copies it
        self.guard = torch.empty(0, dtype=parameter.dtype, device=parameter.device).as_subclass(ShardedGuard)
        self.guard.weight_name = name


class ParamGroup:
    """Weights that are unsharded by one all-gather, and whose gradients are reduced by one reduce-scatter.

    The all-gather writes straight into the weight, gradients are sent without a copy, and the part that is received is
    the shard's gradient. A copy is made only to change the dtype, or to pad rows whose number is not divisible by the
    number of ranks. Groups whose shards need no copy are sent by copy engines, if GPUs reach each other's memory. What
    a step needs is made here once, because the host must stay ahead of the GPU.
    """

    def __init__(
        self, name: str, params: list[ShardedParam], dtype: torch.dtype, grad_dtype: torch.dtype | None = None
    ) -> None:
        self.name, self.params = name, params
        self._wait_label = f"wait for gather of {name}"
        device = params[0].shard.device
        self._shards: list[Tensor] = [p.shard for p in params]
        # The shards share one storage, because the GPU's allocator may keep up to 1 MB behind each separate tensor.
        shapes, own_dtype = [shard.shape for shard in self._shards], self._shards[0].dtype
        in_place = own_dtype == dtype and all(p.shape == p.padded_shape for p in params)
        self.peers: peer_memory.PeerBuffer | None = None  # with the shards, if copy engines send
        if peer_memory.can_reach_peers(device) and in_place:
            self.peers = peer_memory.PeerBuffer(peer_memory.bytes_of(shapes, dtype), device)
            self._parts = [self.peers.tensors(r, shapes, dtype) for r in range(comm.world_size())]
            places = self._parts[comm.rank()]
        else:
            places = ResizableBuffer(shapes, own_dtype, device).tensors
        for shard, place in zip(self._shards, places, strict=True):
            shard.data = place.copy_(shard.data)
        self.unsharded = ResizableBuffer([p.padded_shape for p in params], dtype, device)
        for p, tensor in zip(params, self.unsharded.tensors, strict=True):
            # `.data` has its own version counter, so autograd does not see the all-gather as an in-place change of
            # the saved `full`.
            p.full = nn.Parameter(tensor.data[: p.shape[0]], requires_grad=p.shard.requires_grad)
        self.unsharded.release()
        self._slots = [(parameters, key, (p.full, p.shard, p.guard)) for p in params for parameters, key in p.holders]
        self._installed = SHARDED
        self._all_gather_input = SendBuffer(self._shards, [p.shard_shape for p in params], dtype)
        self._is_unsharded = False  # true from the start of the all-gather on
        self.kept = False  # whether forward leaves it unsharded for backward
        self._all_gather: comm.Transfer | None = None
        self._reduce_scatter: tuple[comm.Transfer, list[Tensor], list[Tensor]] | None = None  # its input and output
        self.by_copies: peer_memory.ReduceScatter | None = None
        self.trainable = [p for p in params if p.full.requires_grad]
        if self.trainable:
            full, padded = [p.full for p in self.trainable], [p.padded_shape for p in self.trainable]
            sent, parts = grad_dtype or dtype, [p.shard_shape for p in self.trainable]
            self._reduce_scatter_input = SendBuffer(full, padded, sent)
            self.bytes_from_each_rank = peer_memory.bytes_of(parts, sent)
        self.forget_backward()

    def forget_backward(self) -> None:
        """Return to the state before a backward pass."""
        self.num_gradients, self.reduced = 0, False
        for p in self.trainable:
            p.full.grad = None

    def install(self, state: int) -> None:
        """Put the whole weights, the shards or the guards into the modules."""
        if state != self._installed:
            self._installed = state
            for parameters, key, by_state in self._slots:
                parameters[key] = by_state[state]

    def unshard(self) -> None:
        """Start the all-gather, unless the group is unsharded already."""
        if self._is_unsharded:
            return
        self._is_unsharded = True
        self.unsharded.allocate()
        whole, name = self.unsharded.tensors, f"gather of {self.name}"
        if self.peers is not None:
            self._all_gather = peer_memory.start_all_gather(whole, self._parts, name)
        else:
            self._all_gather = comm.start_all_gather(whole, self._all_gather_input.copy_in(self._shards), name)

    def wait_for_unshard(self) -> None:
        if self._all_gather is not None:
            with torch._C._profiler._RecordFunctionFast(self._wait_label):
                self._all_gather.wait()
            self._all_gather = None
            self._all_gather_input.release()

    def reshard(self) -> None:
        """Release the memory of the whole weights. The tensors stay, because autograd has saved them."""
        self.kept = False
        if self._is_unsharded:
            self.wait_for_unshard()
            if self._installed == UNSHARDED:
                self.install(SHARDED)
            self.unsharded.release()
            self._is_unsharded = False

    def reduce_gradients(self) -> None:
        """Start the reduce-scatter of the gradients of the whole weights, zeros where there is no gradient."""
        gradients = []
        for p in self.trainable:
            gradients.append(torch.zeros_like(p.full) if p.full.grad is None else p.full.grad)
            p.full.grad = None
        sent = self._reduce_scatter_input.copy_in(gradients)
        received = [x.new_empty(p.shard_shape) for x, p in zip(sent, self.trainable, strict=True)]
        start = comm.start_reduce_scatter_mean if self.by_copies is None else self.by_copies.start
        transfer = start(received, sent, f"scatter of {self.name}")
        self._reduce_scatter = transfer, sent, received
        self.num_gradients, self.reduced = 0, True

    def wait_for_gradients(self) -> None:
        """Add the gradients that are being reduced, if there are any, to the gradients of the shards."""
        if self._reduce_scatter is None:
            return
        transfer, _, received = self._reduce_scatter
        transfer.wait()
        self._reduce_scatter = None  # drops the input too
        self._reduce_scatter_input.release()
        gradients = [part[: len(p.shard)] for part, p in zip(received, self.trainable, strict=True)]
        if any(gradient.dtype != p.shard.grad_dtype for gradient, p in zip(gradients, self.trainable, strict=True)):
            sent, gradients = gradients, [torch.empty_like(p.shard, dtype=p.shard.grad_dtype) for p in self.trainable]
            torch._foreach_copy_(gradients, sent)
        for p, gradient in zip(self.trainable, gradients, strict=True):
            if p.shard.grad is None:
                p.shard.grad = gradient
            else:
                p.shard.grad.add_(gradient)

    def drop_gradients(self) -> None:
        """Discard gradients that are being reduced."""
        if self._reduce_scatter is not None:
            self._reduce_scatter[0].wait()
            self._reduce_scatter = None
            self._reduce_scatter_input.release()

    def gather_full(self, keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        """Map each shard to `keep` of its whole weight, in the dtype of the shard."""
        padded = [p.shard.new_empty(p.padded_shape) for p in self.params]
        shapes = [p.shard_shape for p in self.params]
        sent = SendBuffer(self._shards, shapes, self._shards[0].dtype).copy_in(self._shards)
        comm.start_all_gather(padded, sent, f"gather of all of {self.name}").wait()
        return {p.shard: keep(tensor[: p.shape[0]]) for tensor, p in zip(padded, self.params, strict=True)}


class FSDPModule:
    """A module whose calls need its groups unsharded: a block, or a single Linear or Embedding outside of blocks.

    It has one group, or more if it shares some weights with other modules or has weights of several dtypes.
    """

    def __init__(self, name: str, module: nn.Module, groups: list[ParamGroup]) -> None:
        self.name, self.module, self.groups = name, module, groups
        self.called_at = 0  # autograd's sequence number at the last call
        self.trains = any(p.requires_grad for p in module.parameters())

    def unshard(self) -> None:
        """Unshard all groups, and wait for them."""
        for group in self.groups:
            group.unshard()
        for group in self.groups:
            group.wait_for_unshard()

    def install(self, state: int) -> None:
        for group in self.groups:
            group.install(state)


def shard_module(
    module: nn.Module, compute_dtype: torch.dtype | None, grad_dtype: torch.dtype | None
) -> list[FSDPModule]:
    """Shard the weights of a module. Returns its FSDP modules in the order of registration."""
    holders = find_weights(module)
    modules = find_fsdp_modules(module, holders)
    callers: dict[nn.Parameter, list[int]] = {p: [] for p in holders}
    for number, fsdp_module in enumerate(modules):
        for p in fsdp_module.parameters():
            if p in holders:
                callers[p].append(number)
    # Weights that the same modules need form a group: usually the weights of one module. The group of a tied weight
    # belongs to all modules that share it.
    by_callers: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
    for p in holders:
        by_callers.setdefault((tuple(callers[p]), p.dtype), []).append(p)
    names = {child: name for name, child in module.named_modules()}
    parameter_names = {p: name for name, p in module.named_parameters()}
    groups: list[list[ParamGroup]] = [[] for _ in modules]
    for (numbers, dtype), parameters in by_callers.items():
        parameters.sort(key=lambda p: p.shape[1:])  # layers of one input lie side by side, and can be one product
        params = [ShardedParam(p, parameter_names[p], holders[p]) for p in parameters]
        name = " and ".join(names[modules[number]] for number in numbers)
        group = ParamGroup(name, params, compute_dtype or dtype, grad_dtype)
        for number in numbers:
            groups[number].append(group)
    copied = [group for of_module in groups for group in of_module if group.peers is not None and group.trainable]
    if copied:
        largest = max(group.bytes_from_each_rank for group in copied)
        by_copies = peer_memory.ReduceScatter(largest, copied[0].params[0].shard.device)
        for group in copied:
            group.by_copies = by_copies
    return [FSDPModule(names[m], m, its_groups) for m, its_groups in zip(modules, groups, strict=True)]
