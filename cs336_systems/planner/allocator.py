"""What PyTorch's caching allocator gives for a tensor, which is what `max_memory_allocated` counts."""

MIB = 2**20
_SMALLEST = 512  # kMinBlockSize
_SMALL = MIB  # kSmallSize: up to it, from 2 MiB segments that are cut to size
_SEGMENT = 20 * MIB  # kLargeBuffer: for what is below _LARGE
_LARGE = 10 * MIB  # kMinLargeAlloc: from it, a segment of its own
_ROUND = 2 * MIB  # kRoundLarge: to which such a segment is rounded up


def allocated_bytes(nbytes: float) -> float:
    """Bytes that a fresh tensor takes, on average over equal ones.

    A tensor takes its size in units of 512 bytes. The rest of the segment it is cut from goes with it where that is at
    most 1 MiB, for nothing larger than that is left over (`should_split` in c10/cuda/CUDACachingAllocator.cpp): of a
    segment of its own, rounded up to 2 MiB, from 10 MiB on; of one of 20 MiB, the last that fits, below.

    A tensor that takes the place of one that was freed may have up to 1 MiB more, too. That is not counted.
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
