"""The names that the course's own tests call: this project's classes under the names of its `tests/adapters.py`."""

from typing import Any

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """FlashAttention-2 in PyTorch operations, as a class with `.apply(Q, K, V, is_causal)`."""
    from cs336_systems.kernels.attention.flash_torch import FlashAttentionTorch

    return FlashAttentionTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """FlashAttention-2 in Triton kernels, forward and backward, as a class with `.apply(Q, K, V, is_causal)`."""
    from cs336_systems.kernels.attention.flash_triton import FlashAttentionTriton

    return FlashAttentionTriton


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """Data parallelism that sends each gradient as soon as it is there (2026)."""
    from cs336_systems.parallel.ddp import DDP

    return DDP(module)


def ddp_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """To be called between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


get_ddp_individual_parameters = get_ddp  # their names of 2025
ddp_individual_parameters_on_after_backward = ddp_on_after_backward


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float) -> torch.nn.Module:
    """Data parallelism that sends gradients in buckets of at most this size."""
    from cs336_systems.parallel.bucketed import DDPBucketed

    return DDPBucketed(module, bucket_size_mb)


def ddp_bucketed_on_after_backward(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """To be called between backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(ddp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """To be called at the start of a step: nothing is left to be done then."""


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """The module with its Linear and Embedding weights sharded over all ranks."""
    from cs336_systems.parallel.fsdp import FSDP

    return FSDP(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(fsdp_model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """To be called between backward and the optimizer's step."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All parameters by name, the sharded ones whole."""
    return fsdp_model.gather_full_params()


def get_sharded_optimizer(
    params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> torch.optim.Optimizer:
    """`optimizer_cls(params, **kwargs)` with its state spread over all ranks."""
    from cs336_systems.parallel.zero1 import ShardedOptimizer

    return ShardedOptimizer(params, optimizer_cls, **kwargs)
