"""The kernel called "auto". In a file of its own: the mark on its question loads PyTorch's compiler, in seconds."""

import importlib.util

import torch
from torch import Tensor

from cs336_basics.attention import Documents


def auto(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """sdpa, but flash_triton for a window and documents where it runs: sdpa would compute what they hide."""
    # Statements, because the compiler traces no other kind of import.
    if (window is None and documents is None) or not _runs_flash_triton(q.device):
        from .peers import sdpa as attention
    else:
        from .flash_triton import flash_triton as attention
    return attention(q, k, v, is_causal, window=window, documents=documents)


@torch.compiler.assume_constant_result  # nor can compiled code ask the card
def _runs_flash_triton(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
