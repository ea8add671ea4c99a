"""Transfers by the GPUs' copy engines, between GPUs of one machine that read each other's memory.

NCCL's kernels take multiprocessors and slow the products beside them; copy engines do not. What the others read lies in
PyTorch's symmetric memory, which all ranks allocate together and each maps into its own addresses.
"""

import functools
import logging
import os
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import comm
from .failure import first_line, named
from .ranks import rank, world_size

ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns on GPUs
logger = logging.getLogger(__name__)


class PeerBuffer:
    """Memory of this rank that all ranks read. All of them make one of the same size, together.

    No rank may write what another one still reads, or read what another one still writes: `meet` comes between.
    """

    held_bytes: ClassVar[int] = 0
    """Bytes of all buffers of this process, which PyTorch's allocator does not count."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric  # a GPU's alone

        # Rendezvous makes a multicast object too, which is not used here and which not every machine allows.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Not from PyTorch's pool of such memory: one rank might get used memory from it, and another one new memory.
        self._own = symmetric._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        with named("sharing of memory"):
            self._memory = symmetric.rendezvous(self._own, c10d._get_default_group())
        PeerBuffer.held_bytes += nbytes
        weakref.finalize(self, _count_free, nbytes)

    def tensors(self, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[list[Tensor]]:
        """Tensors of these shapes, one behind the other from the buffer's start: of each shape one for every rank."""
        found, start = [], 0
        for shape in shapes:
            own = self._own[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            theirs = [self._memory.get_buffer(r, shape, dtype, start // dtype.itemsize) for r in range(world_size())]
            found.append([*theirs[: rank()], own, *theirs[rank() + 1 :]])
            start += bytes_of([shape], dtype)
        return found


def _count_free(nbytes: int) -> None:
    PeerBuffer.held_bytes -= nbytes


def bytes_of(shapes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Bytes that aligned tensors of these shapes take, one behind the other."""
    return sum(-(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)


def can_read_peers(device: torch.device) -> bool:
    """Whether each rank has a GPU of its own in one machine, which reads the others' memory. All ranks ask together.

    False if the process group does not allow it.
    """
    is_possible = comm.allows_copy_engines and device.type == "cuda" and world_size() > 1
    return is_possible and _can_read_peers(device, world_size())


@functools.cache
def _can_read_peers(device: torch.device, ranks: int) -> bool:
    found = comm.all_gather_objects((os.uname().nodename, device.index), "which GPUs there are")
    others = [index for _, index in found if index != device.index]
    able = len({host for host, _ in found}) == 1 and len(others) == ranks - 1
    able = able and all(torch.cuda.can_device_access_peer(device, index) for index in others)
    if all(comm.all_gather_objects(able, "whether GPUs reach each other")):
        try:
            PeerBuffer(ALIGNMENT, device)
        except RuntimeError as error:  # a container may forbid to share memory
            logger.warning("NCCL sends everything, because the GPUs cannot share memory: %s", first_line(error))
            able = False
    return all(comm.all_gather_objects(able, "whether GPUs share memory"))


class _Copies:
    """Copies on a stream of their own, as a work that `Transfer` waits for. It keeps their outputs until then."""

    def __init__(self, stream: torch.cuda.Stream, outputs: Sequence[Tensor]) -> None:
        self._event, self._outputs = torch.cuda.Event(), outputs
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def start_reading(outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], name: str) -> comm.Transfer:
    """`comm.start_all_gather` by copies: fill each output (world_size * rows, ...) with the parts of all ranks."""
    stream = _stream_of(outputs[0].device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch._C._profiler._RecordFunctionFast(name):
        copy_parts(outputs, parts)
    return comm.Transfer(name, [_Copies(stream, outputs)])


def copy_parts(outputs: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> None:
    """The same on the current stream."""
    order = [(rank() + 1 + i) % world_size() for i in range(world_size())]  # no two ranks read the same one at once
    for output, of_ranks in zip(outputs, parts, strict=True):
        pieces = output.chunk(world_size())
        for r in order:
            pieces[r].copy_(of_ranks[r])


def meet(device: torch.device, name: str) -> None:
    """Let the current stream continue when all ranks have come here on theirs."""
    comm.mean([torch.zeros(1, device=device)], name)
