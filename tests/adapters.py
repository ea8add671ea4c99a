"""What the course's own tests call: this project's classes under the names of its `tests/adapters.py`."""

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in PyTorch operations, as a class with `.apply(Q, K, V, is_causal)`."""
    from cs336_systems.kernels.attention.flash_torch import FlashAttentionTorch

    return FlashAttentionTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton kernels, forward and backward, as a class with `.apply(Q, K, V, is_causal)`."""
    from cs336_systems.kernels.attention.flash_triton import FlashAttentionTriton

    return FlashAttentionTriton
