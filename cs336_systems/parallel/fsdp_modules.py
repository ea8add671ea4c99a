"""The weights that FSDP shards, and the modules that gather them."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from cs336_basics.model import Embedding, Linear

EMBEDDINGS = (Embedding, nn.Embedding)
SHARDED_LAYERS = (Linear, nn.Linear, *EMBEDDINGS)

Holders = list[tuple[dict[str, Any], str]]
"""Where modules hold a weight: the dict of parameters of each module, and the weight's name there."""


def find_weights(module: nn.Module) -> dict[nn.Parameter, Holders]:
    """The weights of Linear and Embedding, each with all modules that hold it.

    Raises ValueError for an nn.Embedding with sparse gradients or max_norm.
    """
    holders: dict[nn.Parameter, Holders] = {}
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding) and (child.sparse or child.max_norm is not None):
            option = "sparse=True" if child.sparse else f"max_norm={child.max_norm}"
            where = f"{name}.weight".removeprefix(".")
            raise ValueError(f"{where} is of an nn.Embedding with {option}, which fsdp cannot shard")
        weight = child._parameters.get("weight") if isinstance(child, SHARDED_LAYERS) else None
        if weight is not None and weight.numel():
            holders[weight] = []
    for child in module.modules():  # a module of any kind may share a weight
        for name, parameter in child._parameters.items():
            if parameter in holders:
                holders[parameter].append((child._parameters, name))
    return holders


def find_fsdp_modules(module: nn.Module, weights: Container[nn.Parameter]) -> list[nn.Module]:
    """The modules that gather weights when they are called: each element of an nn.ModuleList (a Transformer block),
    and elsewhere each module that has such a weight itself."""

    def find(module: nn.Module, in_list: bool) -> Iterable[nn.Module]:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):  # never called themselves
            in_list = in_list or isinstance(module, nn.ModuleList)
        elif in_list or any(p in weights for p in module._parameters.values() if p is not None):
            yield module
            return
        for child in module.children():
            yield from find(child, in_list)

    return [m for m in dict.fromkeys(find(module, False)) if any(p in weights for p in m.parameters())]


def describe_shards(module: nn.Module, params: Mapping[nn.Parameter, Any]) -> dict[str, tuple[torch.Size, int]]:
    """The sharded parameters of a module by name: the whole shape, and the first row that this rank has."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: (params[p].shape, params[p].first_row) for name, p in named if p in params}
