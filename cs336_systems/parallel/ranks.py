"""Ranks and world sizes, of the process group and as the launcher has set them."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from ..machine.console import count_in_environment, launched_rank

_alone = False


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    group = dist.group.WORLD  # faster than dist.get_world_size, and every transfer needs it
    return group.size() if group is not None and not _alone else 1


def rank() -> int:
    """Rank of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() and not _alone else 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While active, this process acts as if there were no others, to measure the cost of communication."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def environment_rank() -> int:
    """This process's rank as the launcher has set it, before the process group exists; 0 without a launcher."""
    return launched_rank() or 0


def local_rank() -> int:
    """This process's rank on its machine, which is also the index of its GPU."""
    return count_in_environment("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Number of processes on this machine."""
    return count_in_environment("LOCAL_WORLD_SIZE", 1)


def launched() -> bool:
    """Whether torchrun, or this project's launch through the same agent, started this process."""
    return launched_rank() is not None
