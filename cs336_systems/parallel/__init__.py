"""Parallel strategies by name: each wraps a module, and the training loop does not know which one it has."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the strategies; each strategy takes those that it has a use for."""

    bucket_size_mb: float | None = None
    """Bytes of gradients that are sent together, in 2^20 (default: the strategy's)."""
    grad_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent (default: their own)."""
    compute_dtype: torch.dtype | None = None
    """Dtype in which sharded weights are sent and compute (default: their own)."""


def _naive(module: nn.Module, options: Options) -> Strategy:
    from .ddp import NaiveDDP

    return NaiveDDP(module, options.grad_dtype)


def _flat(module: nn.Module, options: Options) -> Strategy:
    from .ddp import FlatDDP

    return FlatDDP(module, options.grad_dtype)


def _overlap(module: nn.Module, options: Options) -> Strategy:
    from .ddp import DDP

    return DDP(module, options.grad_dtype, options.bucket_size_mb)


def _individual(module: nn.Module, options: Options) -> Strategy:
    from .ddp import DDP

    return DDP(module, options.grad_dtype)


def _bucketed(module: nn.Module, options: Options) -> Strategy:
    from .bucketed import DDPBucketed

    size = {} if options.bucket_size_mb is None else {"bucket_size_mb": options.bucket_size_mb}
    return DDPBucketed(module, **size, grad_dtype=options.grad_dtype)


def _torch_ddp(module: nn.Module, options: Options) -> Strategy:
    from .torch_peers import TorchDDP

    size = {} if options.bucket_size_mb is None else {"bucket_size_mb": options.bucket_size_mb}
    return TorchDDP(module, **size, grad_dtype=options.grad_dtype)


def _torch_fsdp(module: nn.Module, options: Options) -> Strategy:
    from .torch_peers import TorchFSDP

    return TorchFSDP(module, options.compute_dtype, options.grad_dtype)


def _fsdp(module: nn.Module, options: Options) -> Strategy:
    from .fsdp import FSDP

    return FSDP(module, options.compute_dtype, options.grad_dtype)


# Register a new strategy here; its module is imported when it is used.
STRATEGIES: dict[str, Callable[[nn.Module, Options], Strategy]] = {
    "none": lambda module, options: Strategy(module),
    "naive": _naive,
    "flat": _flat,
    "overlap": _overlap,
    "individual": _individual,
    "bucketed": _bucketed,
    "flashddp": _bucketed,
    "torch_ddp": _torch_ddp,
    "fsdp": _fsdp,
    "torch_fsdp": _torch_fsdp,
}
