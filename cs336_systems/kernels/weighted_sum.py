"""A weighted sum of each row in Triton: the handout's first example, an introduction to how a kernel is written.

Forward: y_i = sum_j w_j x_ij. Backward: dx_ij = dy_i w_j and dw_j = sum_i dy_i x_ij.

Legend
    ROWS, D    number of rows of x (all leading dimensions flattened into one), and their length
    TILE_ROWS  rows that one program works on
    TILE_D     columns that it holds at a time; it loops over D in steps of this size
    x, y, w    pointers to contiguous (ROWS, D), (ROWS,) and (D,) tensors; dx, dy, dw are their gradients
    partial_dw (programs, D) float32: the part of dw from each program's rows

A kernel is a function that many programs run at once, each with its own `tl.program_id`. It works on tiles, which are
blocks of numbers held in registers. It sees memory only as pointers: one statement loads or stores a whole tile of
pointers, with a mask where the tile extends beyond the tensor. Arguments marked `tl.constexpr` are constants at compile
time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from .launch import check_device

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE_ROWS = 16
_MAX_TILE_D = 512


@triton.jit
def _forward_kernel(x, w, y, ROWS, D: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_D: tl.constexpr):
    # 64-bit, because a row index times D may not fit in 32 bits.
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    total = tl.zeros([TILE_ROWS], tl.float32)
    for start in range(0, D, TILE_D):
        columns = start + tl.arange(0, TILE_D)
        inside = (rows[:, None] < ROWS) & (columns[None, :] < D)
        # Elements outside the tensor are read as 0 and add nothing.
        x_tile = tl.load(x + rows[:, None] * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        w_tile = tl.load(w + columns, mask=columns < D, other=0.0).to(tl.float32)
        total += tl.sum(x_tile * w_tile[None, :], axis=1)
    tl.store(y + rows, total.to(y.dtype.element_ty), mask=rows < ROWS)


@triton.jit
def _backward_kernel(x, w, dy, dx, partial_dw, ROWS, D: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_D: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    rows = program * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dy_tile = tl.load(dy + rows, mask=rows < ROWS, other=0.0).to(tl.float32)
    for start in range(0, D, TILE_D):
        columns = start + tl.arange(0, TILE_D)
        inside = (rows[:, None] < ROWS) & (columns[None, :] < D)
        places = rows[:, None] * D + columns[None, :]
        w_tile = tl.load(w + columns, mask=columns < D, other=0.0).to(tl.float32)
        dx_tile = dy_tile[:, None] * w_tile[None, :]
        tl.store(dx + places, dx_tile.to(dx.dtype.element_ty), mask=inside)
        # Every program contributes to every dw_j. Each writes its own part, and the parts are added afterwards: adding
        # to one address from many programs would need atomics, whose order, and so whose rounding, changes.
        x_tile = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        dw_tile = tl.sum(dy_tile[:, None] * x_tile, axis=0)
        tl.store(partial_dw + program * D + columns, dw_tile, mask=columns < D)


class WeightedSum(torch.autograd.Function):
    """`weighted_sum` as the autograd.Function that calls the kernels: `.apply(x, weight)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        _check(x, weight)
        x, weight = _as_in_memory(x), _as_in_memory(weight)
        ctx.save_for_backward(x, weight)
        y = x.new_empty(x.shape[:-1])
        if y.numel():  # an empty grid cannot be launched
            with torch.cuda.device_of(x):
                _forward_kernel[(_programs(y.numel()),)](x, weight, y, y.numel(), x.shape[-1], **_tiles(x))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():  # autograd would silently treat the gradients as constants
            raise RuntimeError("weighted_sum has no second derivatives: it was called with create_graph=True")
        x, weight, dy = map(_as_in_memory, (*ctx.saved_tensors, dy))  # hooks may change strides
        rows, d = dy.numel(), x.shape[-1]
        dx = torch.empty_like(x)
        partial_dw = x.new_empty((_programs(rows), d), dtype=torch.float32)
        if rows:
            with torch.cuda.device_of(x):
                _backward_kernel[(_programs(rows),)](x, weight, dy, dx, partial_dw, rows, d, **_tiles(x))
        return dx, partial_dw.sum(dim=0).to(weight.dtype)


def weighted_sum(x: Float[Tensor, "... d"], weight: Float[Tensor, " d"]) -> Float[Tensor, "..."]:
    """sum_j weight_j x_...j over the last dimension, accumulated in float32, returned in x's dtype.

    Differentiable once in both arguments. Runs on a CUDA device, or on a CPU in Triton's interpreter, in float32,
    bfloat16 and float16. The same inputs give the same bits. It is an example to read, and does not support
    torch.compile. Raises ValueError naming the argument that it does not accept. Source: CS336 assignment 2, weighted
    sum.
    """
    return WeightedSum.apply(x, weight)


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: it must be x's last dimension, {tuple(x.shape[-1:])}"
        )
    if x.dtype not in _DTYPES:
        raise ValueError(f"x is {x.dtype}: it must be one of {', '.join(map(str, _DTYPES))}")
    if weight.dtype != x.dtype:
        raise ValueError(f"weight is {weight.dtype}: it must be of x's dtype, which is {x.dtype}")
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}: it must be on x's device, which is {x.device}")
    check_device(x, "weighted_sum", name="x")


def _as_in_memory(x: Tensor) -> Tensor:
    """x contiguous, with a lazy negation applied: memory holds a conjugate's imaginary part with the other sign."""
    return x.contiguous().resolve_neg()


def _programs(rows: int) -> int:
    return triton.cdiv(rows, _TILE_ROWS)


def _tiles(x: Tensor) -> dict[str, int]:
    return {"TILE_ROWS": _TILE_ROWS, "TILE_D": min(_MAX_TILE_D, triton.next_power_of_2(max(x.shape[-1], 1)))}
