"""The model's plain attention with a named range around each of its three parts."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_basics.model import without_autocast

from ...planner.accounting import PLAIN_ATTENTION
from ..instruments.trace import named_range
from ..workload import Workbench

SCORES, SOFTMAX, VALUES = "attention scores", "attention softmax", "attention values"
ATTENTION_RANGES = (SCORES, SOFTMAX, VALUES)


def annotated_attention(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
) -> Float[Tensor, "... queries d"]:
    """`cs336_basics.model.scaled_dot_product_attention`, operation by operation, in the ranges ATTENTION_RANGES."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q.device.type):
        with named_range(SCORES):
            scores = (q.to(dtype) / math.sqrt(q.shape[-1])) @ k.to(dtype).mT
            if is_causal:
                visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
                scores = scores.masked_fill(~visible, float("-inf"))
        with named_range(SOFTMAX):
            weights = scores.softmax(dim=-1)
        with named_range(VALUES):
            return (weights @ v.to(dtype)).to(q.dtype)


def annotate_attention(bench: Workbench) -> bool:
    """Give the model annotated attention. False and no change if its attention is another kernel or compiled.

    A range inside a compiled function would break its graph.
    """
    if bench.config.attention not in PLAIN_ATTENTION or bench.config.compile:
        return False
    blocks: list[Any] = list(bench.model.layers)
    for block in blocks:
        block.attn.attention = annotated_attention
    return True
