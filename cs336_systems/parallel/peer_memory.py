"""Transfers by the GPUs' copy engines, between GPUs of one machine that read each other's memory.

NCCL's kernels take multiprocessors and slow the products beside them; copy engines do not. What the others read lies in
PyTorch's symmetric memory, which all ranks allocate together and each maps into its own addresses.
"""

import functools
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import comm
from .ranks import rank, world_size

_ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns on GPUs


class PeerBuffer:
    """Memory of this rank that all ranks read. All of them make one of the same size, together.

    No rank may write what another one still reads, or read what another one still writes: `meet` comes between.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric  # a GPU's alone

        self.nbytes = nbytes
        with torch.cuda.use_mem_pool(symmetric.get_mem_pool(device)):
            self._own = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory = symmetric.rendezvous(self._own, c10d._get_default_group())

    def tensors(self, shapes: Sequence[torch.Size], dtype: torch.dtype, start: int = 0) -> list[list[Tensor]]:
        """Tensors of these shapes, one behind the other from a byte of the buffer on: of each one for every rank."""
        found = []
        for shape in shapes:
            size = shape.numel() * dtype.itemsize
            own = self._own[start : start + size].view(dtype).view(shape)
            theirs = [self._memory.get_buffer(r, shape, dtype, start // dtype.itemsize) for r in range(world_size())]
            found.append([*theirs[: rank()], own, *theirs[rank() + 1 :]])
            start += bytes_of([shape], dtype)
        return found


def bytes_of(shapes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Bytes that tensors of these shapes take in a PeerBuffer."""
    return sum(-(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes)


def can_read_peers(device: torch.device) -> bool:
    """Whether each rank has a GPU of its own in one machine, which reads the others' memory. All ranks ask together."""
    return device.type == "cuda" and world_size() > 1 and _can_read_peers(device, world_size())


@functools.cache
def _can_read_peers(device: torch.device, ranks: int) -> bool:
    found = comm.all_gather_objects((os.uname().nodename, device.index), "which GPUs there are")
    others = [index for _, index in found if index != device.index]
    able = len({host for host, _ in found}) == 1 and len(others) == ranks - 1
    able = able and all(torch.cuda.can_device_access_peer(device, index) for index in others)
    if all(comm.all_gather_objects(able, "whether GPUs reach each other")):
        try:
            PeerBuffer(_ALIGNMENT, device)
        except RuntimeError:  # a container may forbid to share memory
            able = False
    return all(comm.all_gather_objects(able, "whether GPUs read each other"))


class _Copies:
    """Copies on a stream of their own, as a work that `Transfer` waits for."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


@functools.cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def start_reading(outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], name: str) -> comm.Transfer:
    """`comm.start_all_gather` by copies: fill each output (world_size * rows, ...) with the parts of all ranks."""
    return _start(_reading_stream(outputs[0].device), lambda: _copy(outputs, parts), name)


def _start(
    stream: torch.cuda.Stream, work: Callable[[], None], name: str, apply: Callable[[], None] | None = None
) -> comm.Transfer:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch._C._profiler._RecordFunctionFast(name):
        work()
    return comm.Transfer(name, [_Copies(stream)], apply)


def _copy(outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    for output, of_ranks in zip(outputs, parts, strict=True):
        for piece, part in zip(output.chunk(world_size()), of_ranks, strict=True):
            piece.copy_(part)


def meet(device: torch.device, name: str) -> None:
    """Let the current stream continue when all ranks have come here on theirs."""
    comm.mean([torch.zeros(1, device=device)], name)


class Averager:
    """Averages gradients as `comm.start_mean` does: by a reduce-scatter, whose parts are then gathered by copies.

    Tensors of a number of elements that is not divisible by the number of ranks are sent by `comm.start_mean`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: PeerBuffer | None = None
        self._parts: dict[tuple[tuple[int, ...], torch.dtype], list[list[Tensor]]] = {}

    def start_mean(self, tensors: Sequence[Tensor], name: str) -> comm.Transfer:
        """Average tensors of one dtype over all ranks, in place."""
        comm.check_dense(tensors, name)
        flat = [t.view(-1) for t in tensors if t.is_contiguous() and t.numel() and t.numel() % world_size() == 0]
        rest = comm.start_mean([t for t in tensors if not t.is_contiguous() or t.numel() % world_size()], name)
        if not flat:
            return rest
        return _start(_reading_stream(self._device), lambda: self._mean(flat, name), name, rest.wait)

    def _mean(self, flat: Sequence[Tensor], name: str) -> None:
        parts = self._parts_of(flat)
        # The scatter also keeps this rank from writing parts which others read: it needs all ranks, and each begins it
        # after its copies of the parts before.
        comm.start_reduce_scatter_mean([of_ranks[rank()] for of_ranks in parts], flat, name).wait()
        meet(self._device, name)
        _copy(flat, parts)

    def _parts_of(self, flat: Sequence[Tensor]) -> list[list[Tensor]]:
        dtype, shapes = flat[0].dtype, [torch.Size([t.numel() // world_size()]) for t in flat]
        nbytes = bytes_of(shapes, dtype)
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._buffer, self._parts = PeerBuffer(nbytes, self._device), {}
        key = tuple(shape.numel() for shape in shapes), dtype
        if key not in self._parts:
            self._parts[key] = self._buffer.tensors(shapes, dtype)
        return self._parts[key]
