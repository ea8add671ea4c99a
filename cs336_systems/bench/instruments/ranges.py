"""Named ranges of work: in PyTorch's profiler, and on a GPU as NVTX ranges too, so that Nsight Systems shows them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Give the work inside a name that profilers show. Without a profiler this costs the host microseconds."""
    on_gpu = torch.cuda.is_initialized()
    with torch.profiler.record_function(name):
        if on_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if on_gpu:
                torch.cuda.nvtx.range_pop()
