"""The kernel called "auto". In a file of its own: the mark on its question loads PyTorch's compiler, in seconds."""

import importlib.util

import torch
from torch import Tensor

from cs336_basics.attention import Documents

from .. import recording


def auto(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """flash_triton where it is faster, else sdpa.

    flash_triton is faster for windows and documents, because sdpa computes what they hide. On Hopper it is also faster
    for 16-bit sequences from 4,096 tokens on, and from 512 on where a CUDA graph is recorded: launching it takes the
    host longer than sdpa, and a replay launches nothing.
    """
    capability = _capability(q.device)
    long = 512 if recording.is_on else 4096
    is_long = min(q.shape[-2], k.shape[-2]) >= long and 32 < q.shape[-1] <= 128 and q.dtype.itemsize == 2
    # Statements, because the compiler traces no other kind of import.
    if capability < 80 or (window is None and documents is None and not (is_long and capability == 90)):
        from .peers import sdpa as attention
    else:
        from .flash_triton import flash_triton as attention
    return attention(q, k, v, is_causal, window=window, documents=documents)


@torch.compiler.assume_constant_result  # nor can compiled code ask the card
def _capability(device: torch.device) -> int:
    """90 for a card of compute capability 9.0; 0 where flash_triton does not run."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
