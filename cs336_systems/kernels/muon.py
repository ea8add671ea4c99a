"""Muon's work besides its products in two passes over memory, for many matrices at once, in Triton: see `adamw`.

`directions` updates the momentum; matrices of equal shape are then orthogonalised together, and `move` updates weights.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from .adamw import (
    OLDEST,
    Tables,
    block_of,
    load_weights,
    master_pointers,
    pointed_to,
    pointers,
    store_weights,
)
from .launch import check_device


@triton.jit(do_not_specialize=["count"])
def _directions_kernel(
    addresses, blocks, count, factor_pointer, directions, momentum, rest,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = tl.load(factor_pointer)
    if factor > 0:
        row, first, inside = block_of(addresses, blocks, ALIGNED, BLOCK)
        at_buffer = pointers(row + 2 * count, first, WEIGHT, ALIGNED, BLOCK)
        place = tl.load(row + 3 * count) + first
        # Four neighbours a thread, as in `pointers`.
        at_direction = directions + (tl.multiple_of(place, 4) if ALIGNED else place) + tl.arange(0, BLOCK)
        g = tl.load(pointers(row + count, first, GRADIENT, ALIGNED, BLOCK), mask=inside, other=0.0)
        g = g.to(tl.float32) * factor
        buffer = momentum * tl.load(at_buffer, mask=inside, other=0.0) + rest * g
        tl.store(at_buffer, buffer, mask=inside)
        tl.store(at_direction, (momentum * buffer + rest * g).to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _move_kernel(
    addresses, blocks, count, factor_pointer, rate_pointer, size, decay,
    GRADIENT: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(factor_pointer) > 0:
        row, first, inside = block_of(addresses, blocks, ALIGNED, BLOCK)
        rate = tl.load(rate_pointer)
        at_master = master_pointers(row + 2 * count, first, WEIGHT, ALIGNED, BLOCK)
        at_weight = pointers(row + 3 * count, first, WEIGHT, ALIGNED, BLOCK)
        update = tl.load(pointers(row + count, first, GRADIENT, ALIGNED, BLOCK), mask=inside, other=0.0).to(tl.float32)
        weights = (1 - rate * decay).to(tl.float32) * load_weights(at_weight, at_master, inside, WEIGHT)
        weights -= (rate * size).to(tl.float32) * update
        store_weights(weights, at_weight, at_master, inside, WEIGHT)


def directions(
    gradients: Sequence[Tensor],
    buffers: Sequence[Tensor],
    tables: Tables,
    *,
    factor: Float[Tensor, ""],
    momentum: float,
) -> Float[Tensor, "numbers"]:
    """Nesterov's directions in bfloat16, one after the other, after an update of the momentum by gradients x `factor`.

    Unless factor is above 0, nothing changes, and the directions are not computed. Gradients and float32 buffers are
    contiguous and not none; the buffers stay where they are from call to call.
    """
    check_device(gradients[0], "directions", "a gradient", at_least=OLDEST)
    found = gradients[0].new_empty(sum(g.numel() for g in gradients), dtype=torch.bfloat16)
    for table in pointed_to(tables, gradients, [[buffer] for buffer in buffers], packed=True):
        table.launch(_directions_kernel, factor, found, momentum, 1 - momentum)
    return found


def move(
    updates: Sequence[Tensor],
    weights: Sequence[Sequence[Tensor]],
    tables: Tables,
    *,
    factor: Float[Tensor, ""],
    rate: Float[Tensor, ""],
    size: float,
    weight_decay: float,
) -> None:
    """Decay weights and subtract updates times `size`, all times `rate`; change nothing unless factor is above 0.

    weights: for each update the float32 weight or its lower half, and the weight that the model has, as in `adamw`.
    rate is float64.
    """
    check_device(updates[0], "move", "an update", at_least=OLDEST)
    for table in pointed_to(tables, updates, weights):
        table.launch(_move_kernel, factor, rate, size, weight_decay)
