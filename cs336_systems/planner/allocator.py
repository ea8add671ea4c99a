"""The bytes that PyTorch's caching allocator gives a tensor. `torch.cuda.max_memory_allocated` counts these."""

from .working import MIB

# Constants of c10/cuda/CUDACachingAllocator.cpp.
_SMALLEST = 512  # kMinBlockSize
_SMALL = MIB  # kSmallSize: up to this size, tensors are cut from 2 MiB segments
_SEGMENT = 20 * MIB  # kLargeBuffer: segments for tensors below _LARGE
_LARGE = 10 * MIB  # kMinLargeAlloc: from this size on, a tensor has a segment of its own
_ROUND = 2 * MIB  # kRoundLarge: such a segment is rounded up to a multiple of this


def allocated_bytes(nbytes: float) -> float:
    """Bytes that a fresh tensor takes, on average over equal tensors.

    A tensor takes its size rounded up to 512 bytes, plus the rest of its segment if that is at most 1 MiB: only a
    larger rest is split off (`should_split`). From 10 MiB on, the segment is the tensor's own, rounded up to 2 MiB.
    Below that it has 20 MiB, and the last tensor that fits gets the rest.

    A tensor in reused memory may get up to 1 MiB more. That is not counted.
    """
    size = -(-int(nbytes) // _SMALLEST) * _SMALLEST
    if size <= _SMALL:
        return size
    if size >= _LARGE:
        rest = -size % _ROUND
        return size + (rest if rest <= _SMALL else 0)
    fit = _SEGMENT // size
    rest = _SEGMENT - fit * size
    return size + (rest / fit if rest <= _SMALL else 0)
