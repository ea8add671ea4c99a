"""Collectives by the GPUs' copy engines, between GPUs of one machine that reach each other's memory.

NCCL's kernels take multiprocessors and slow the products beside them; copy engines do not. What other ranks read or
write lies in PyTorch's symmetric memory, which all ranks allocate together and each maps into its own addresses.
Kernels only average gradients and carry out barriers.
"""

import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from . import comm
from .failure import first_line, named
from .ranks import rank, world_size

ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns on GPUs
LEAST_BYTES = 2**20
"""Bytes of the smallest tensor that `AllReduce` averages. NCCL averages smaller ones."""
logger = logging.getLogger(__name__)


class PeerBuffer:
    """Memory of this rank that all ranks read and write. All of them make one of the same size, together.

    No rank may write what another one still reads, or read what another one still writes: `barrier` comes between.
    """

    held_bytes: ClassVar[int] = 0
    """Bytes asked for by all buffers of this process, which PyTorch's allocator does not count."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric  # a GPU's alone

        # Rendezvous makes a multicast object too, which is not used here and which not every machine allows.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        # Not from PyTorch's pool of such memory: one rank might get used memory from it, and another one new memory.
        self._own = symmetric._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        with named("sharing of memory"):
            self._memory = symmetric.rendezvous(self._own, c10d._get_default_group())
        self._known: dict[tuple[int, torch.dtype, *tuple[torch.Size, ...]], list[Tensor]] = {}
        PeerBuffer.held_bytes += nbytes
        weakref.finalize(self, _count_free, nbytes)

    def tensors(self, owner: int, shapes: Sequence[torch.Size], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these shapes in the memory of a rank, one behind the other from its start."""
        key: tuple[int, torch.dtype, *tuple[torch.Size, ...]] = (owner, dtype, *shapes)
        if key in self._known:
            return self._known[key]
        found, offset = [], 0
        for shape in shapes:
            if owner == rank():
                found.append(self._own[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape))
            else:
                found.append(self._memory.get_buffer(owner, shape, dtype, offset // dtype.itemsize))
            offset += bytes_of([shape], dtype)
        self._known[key] = found
        return found

    def barrier(self) -> None:
        """Let the current stream continue when all ranks have come here on theirs."""
        self._memory.barrier(timeout_ms=int(1000 * comm.timeout_s))


def _count_free(nbytes: int) -> None:
    PeerBuffer.held_bytes -= nbytes


def bytes_of(shapes: Sequence[torch.Size], dtype: torch.dtype) -> int:
    """Bytes that aligned tensors of these shapes take, one behind the other."""
    return sum(-(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape in shapes)


def can_reach_peers(device: torch.device) -> bool:
    """Whether each rank has a GPU of its own in one machine, which reaches the others' memory. All ranks ask together.

    False if the process group does not allow it, or has no NCCL for the rest.
    """
    is_possible = comm.allows_copy_engines and world_size() > 1 and comm.by_nccl(device)
    return is_possible and _can_reach_peers(device, world_size())


@functools.cache
def _can_reach_peers(device: torch.device, ranks: int) -> bool:
    found = comm.all_gather_objects((os.uname().nodename, device.index), "which GPUs there are")
    others = [index for _, index in found if index != device.index]
    able = len({host for host, _ in found}) == 1 and len(others) == ranks - 1
    able = able and all(_has_atomics(device.index, index) for index in others)
    if all(comm.all_gather_objects(able, "whether GPUs reach each other")):
        try:
            PeerBuffer(ALIGNMENT, device)
        except RuntimeError as error:  # a container may forbid to share memory
            logger.warning("NCCL sends everything, because the GPUs cannot share memory: %s", first_line(error))
            able = False
    return all(comm.all_gather_objects(able, "whether GPUs share memory"))


def _has_atomics(own: int, other: int) -> bool:
    """Whether a GPU reaches another one's memory by atomic operations, as over NVLink. Barriers need them."""
    found, native_atomics = ctypes.c_int(0), 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    error = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(found), native_atomics, own, other)
    return error == 0 and found.value == 1


class _Copies:
    """Copies on a stream of their own, as a work that `Transfer` waits for."""

    def __init__(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        self._work = work  # holds the tensors until `Transfer` drops it
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event.query()


@functools.cache
def _stream_for(kind: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def start(kind: str, work: Callable[[], None], device: torch.device, name: str) -> _Copies:
    """Queue work on the stream for its kind, behind all that the current stream has so far."""
    stream = _stream_for(kind, device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch._C._profiler._RecordFunctionFast(name), torch.no_grad():
        work()
    return _Copies(stream, work)


PiecesOfRanks = Sequence[Sequence[Tensor]]
"""For each rank, the pieces of tensors that belong to it."""


def start_all_gather(outputs: Sequence[Tensor], parts: PiecesOfRanks, name: str) -> comm.Transfer:
    """`comm.start_all_gather` by copies: fill each output (world_size * rows, ...) with the parts of all ranks.

    There is no barrier: the parts must be written before, and stay unchanged until all ranks have read them.
    """
    pieces = _rows_of_ranks(outputs)
    return comm.Transfer(name, [start("gather", lambda: _read(pieces, parts), outputs[0].device, name)])


def _rows_of_ranks(tensors: Sequence[Tensor]) -> PiecesOfRanks:
    return list(zip(*(t.chunk(world_size()) for t in tensors), strict=True))


def _read(pieces: PiecesOfRanks, parts: PiecesOfRanks) -> None:
    """Fill the pieces from the parts of the ranks, beginning with the next rank's."""
    for distance in range(1, world_size() + 1):
        r = (rank() + distance) % world_size()  # ranks that start together read from different ones
        for piece, part in zip(pieces[r], parts[r], strict=True):
            piece.copy_(part)


def _mean_of_parts(inbox: PeerBuffer, pieces: PiecesOfRanks, outputs: Sequence[Tensor]) -> None:
    """Average each piece over all ranks, on the rank that it belongs to, into that rank's outputs.

    The other ranks write theirs into its inbox. It starts from its own piece and rounds a running mean after each
    other one. One barrier comes before the means and one after. Then every inbox may be written again.
    """
    others = world_size() - 1
    inboxes = [
        inbox.tensors(r, [torch.Size((others, *piece.shape)) for piece in pieces[r]], pieces[0][0].dtype)
        for r in range(world_size())
    ]
    for number in range(others):
        owner = (rank() + 1 + number) % world_size()
        for piece, incoming in zip(pieces[owner], inboxes[owner], strict=True):
            incoming[number].copy_(piece)
    inbox.barrier()
    for mean, incoming, output in zip(pieces[rank()], inboxes[rank()], outputs, strict=True):
        for count, other in enumerate(incoming, start=2):
            mean = torch.lerp(mean, other, 1 / count, out=output)
    inbox.barrier()


class ReduceScatter:
    """`comm.start_reduce_scatter_mean` by copies.

    nbytes: the most that a rank gets from another one in a call, by `bytes_of`.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._inbox = PeerBuffer(nbytes * (world_size() - 1), device)

    def start(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], name: str) -> comm.Transfer:
        """Average inputs (world_size * rows, ...) over ranks. Leave this rank's rows of each in outputs (rows, ...).

        All tensors are contiguous and of one dtype. The inputs stay unchanged.
        """
        pieces = _rows_of_ranks(inputs)
        work = start("reduce", lambda: _mean_of_parts(self._inbox, pieces, outputs), outputs[0].device, name)
        return comm.Transfer(name, [work])


class AllReduce:
    """Averages large tensors in place, by copies: a reduce-scatter, and an all-gather of its means.

    The elements of a call, one tensor behind the other, are cut into a run for each rank, which averages it. The runs
    are equally long; only the last ones may be shorter or empty. So n tensors are at most n + world_size - 1 copies,
    and not n * world_size: a copy takes time besides its bytes.

    nbytes, tensors: the most in a call.
    """

    def __init__(self, nbytes: int, tensors: int, device: torch.device) -> None:
        self._nbytes = nbytes
        part = -(-nbytes // world_size()) + tensors * ALIGNMENT
        self._inbox, self._outbox = PeerBuffer(part * (world_size() - 1), device), PeerBuffer(part, device)

    def start(self, tensors: Sequence[Tensor], name: str) -> tuple[list[_Copies], list[Tensor]]:
        """Start the averages of large tensors, contiguous and of one dtype. Return the work, and the tensors left over.

        Small ones are left over: one NCCL kernel takes less time than many copies. So are more than `nbytes`, which
        come from weights that somebody has cast since they were wrapped.
        """
        if sum(t.nbytes for t in tensors) > self._nbytes:
            return [], list(tensors)
        large = [t for t in tensors if t.nbytes >= LEAST_BYTES]
        works = [start("reduce", lambda: self._all_reduce(large), large[0].device, name)] if large else []
        return works, [t for t in tensors if t.nbytes < LEAST_BYTES]

    def _all_reduce(self, tensors: Sequence[Tensor]) -> None:
        size, offset = -(-sum(t.numel() for t in tensors) // world_size()), 0
        pieces: list[list[Tensor]] = [[] for _ in range(world_size())]
        for t in tensors:
            for r in range(offset // size, -(-(offset + t.numel()) // size)):
                pieces[r].append(t.view(-1)[max(0, r * size - offset) : (r + 1) * size - offset])
            offset += t.numel()
        means = [self._outbox.tensors(r, [p.shape for p in pieces[r]], tensors[0].dtype) for r in range(world_size())]
        _mean_of_parts(self._inbox, pieces, means[rank()])
        _read(pieces, means)  # before the next call's first barrier, so before its means
