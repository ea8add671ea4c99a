"""The attention kernels by name. All keep the contract of `cs336_basics.model.scaled_dot_product_attention`."""

import torch
from torch import Tensor

from cs336_basics.model import Attention, scaled_dot_product_attention


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which picks one of its own kernels."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


ATTENTION: dict[str, Attention] = {
    "naive": scaled_dot_product_attention,
    "sdpa": sdpa,
}


def get_attention(name: str) -> Attention:
    """The kernel registered as `name`; auto is sdpa. Raises ValueError naming `model.attention`."""
    if name == "auto":
        name = "sdpa"
    if name not in ATTENTION:
        raise ValueError(f"model.attention is {name!r}: it must be auto or one of {', '.join(ATTENTION)}")
    return ATTENTION[name]
