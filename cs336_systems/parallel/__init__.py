"""Parallel strategies by name: each wraps a module, and the training loop does not know which one it has."""

import importlib
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
    reshard_after_forward: bool = True
    """Whether sharded weights are freed after the forward pass and gathered again for the backward pass."""


Maker = Callable[[nn.Module, Options], Strategy]


def _maker(place: str, *names: str) -> Maker:
    """What makes the strategy at "module:class" with these of the options that are given; it imports the module."""
    module, _, name = place.partition(":")

    def make(wrapped: nn.Module, options: Options) -> Strategy:
        strategy: type[Strategy] = getattr(importlib.import_module(f".{module}", __name__), name)
        given = {name: value for name in names if (value := getattr(options, name)) is not None}
        return strategy(wrapped, **given)

    return make


# Register a new strategy here.
STRATEGIES: dict[str, Maker] = {
    "none": lambda module, options: Strategy(module),
    "naive": _maker("ddp:NaiveDDP", "grad_dtype"),
    "flat": _maker("ddp:FlatDDP", "grad_dtype"),
    "overlap": _maker("ddp:DDP", "grad_dtype", "bucket_size_mb"),
    "individual": _maker("ddp:DDP", "grad_dtype"),
    "bucketed": _maker("bucketed:DDPBucketed", "grad_dtype", "bucket_size_mb"),
    "torch_ddp": _maker("torch_peers:TorchDDP", "grad_dtype", "bucket_size_mb"),
    "fsdp": _maker("fsdp:FSDP", "grad_dtype", "compute_dtype", "reshard_after_forward"),
    "torch_fsdp": _maker("torch_peers:TorchFSDP", "grad_dtype", "compute_dtype", "reshard_after_forward"),
}
STRATEGIES["flashddp"] = STRATEGIES["bucketed"]
