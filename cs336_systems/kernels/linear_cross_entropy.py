"""The head of a language model and its loss, computed for some tokens at a time, so that memory never holds all logits.

With a vocabulary of 150,000 the logits of 32,768 tokens are 10 GB in bfloat16, and their softmax in float32 is 20 GB.
So each chunk of tokens computes its gradients in the forward pass and frees its logits; gradients as large as x and W
stay until backward. Checkpointing the head would instead recompute the logits, a quarter of the head's operations.
Hsu et al. 2024, "Liger Kernel: Efficient Triton Kernels for LLM Training", do the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_basics.attention import without_autocast


def chunked_linear_cross_entropy(
    x: Float[Tensor, "... d"],
    weight: Float[Tensor, "vocab d"],
    targets: Int[Tensor, "..."],
    reduction: str = "mean",
    *,
    chunk_tokens: int,
    rows_loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Float[Tensor, ""]:
    """`cs336_basics.nn_utils.linear_cross_entropy` with the logits of at most `chunk_tokens` tokens in memory.

    Products are computed in the dtype of x and weight, or of autocast; softmax, sums over tokens and the gradient of
    the weight are float32 (float64 stays). That is rounded once, to the weight's `grad_dtype`. reduction: "mean" or
    "sum". rows_loss: `loss_and_gradient`, or a compiled version of it. Every target counts: none is ignored. Backward
    may be called only once and has no second derivatives. Raises ValueError for another reduction and for targets that
    are not one integer for each row of x.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}: it must be 'mean' or 'sum'")
    if targets.shape != x.shape[:-1] or targets.is_floating_point():  # others would be reshaped or rounded
        given = f"{targets.dtype} of shape {tuple(targets.shape)}"
        raise ValueError(f"targets are {given}: they must be integers of shape {tuple(x.shape[:-1])}, as x has rows")
    device = x.device.type
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if device != "meta" and torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    is_training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    flat, wanted = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    scale = 1 / max(1, len(flat)) if reduction == "mean" else 1.0
    kept = (weight.grad_dtype if weight.is_leaf else None) or weight.dtype
    settings = dtype, kept, scale, chunk_tokens, is_training, rows_loss or loss_and_gradient
    with without_autocast(device):
        return _Chunked.apply(flat, weight, wanted, *settings)


def loss_and_gradient(logits: Float[Tensor, "T V"], targets: Int[Tensor, "T"]) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of some tokens, in at least float32, and its gradient (T, V) in the logits' dtype."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logsumexp = wide.logsumexp(dim=-1, keepdim=True)
    loss = (logsumexp - wide.gather(-1, targets[:, None])).sum()
    # A comparison, because a scatter to the targets would be a separate pass over all logits when compiled.
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return loss, (wide - logsumexp).exp_().add_(is_target, alpha=-1).to(logits.dtype)


_NO_TARGET = torch.iinfo(torch.int64).min  # not PyTorch's -100: the loss with gradients ignores no target either


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        kept: torch.dtype,
        scale: float,
        chunk_tokens: int,
        is_training: bool,
        rows_loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        w = weight.to(dtype)
        loss = torch.zeros((), dtype=wide, device=x.device)
        needs_x, needs_weight = (is_training and needed for needed in ctx.needs_input_grad[:2])
        dx = torch.empty_like(x) if needs_x else None
        dw = torch.zeros(weight.shape, dtype=wide, device=x.device) if needs_weight else None
        count = max(1, -(-len(x) // chunk_tokens))
        size = max(1, -(-len(x) // count))  # chunks of equal size, as far as possible, are compiled once
        for first in range(0, len(x), size):
            here = slice(first, first + size)
            rows = x[here].to(dtype)
            logits = rows @ w.T
            if not is_training:
                loss += torch.nn.functional.cross_entropy(
                    logits.to(wide), targets[here], reduction="sum", ignore_index=_NO_TARGET
                )
                continue
            summed, gradient = rows_loss(logits, targets[here])
            del logits
            loss += summed
            if dx is not None:
                dx[here] = _product(gradient, w, wide).mul_(scale)  # rounded to x's dtype only once
            if dw is not None:
                _add_product(dw, gradient.T, rows)
        if dw is not None:  # rounded now, because it stays while all activations are in memory
            dw = dw.mul_(scale)
            dw = dw if kept == torch.float16 else dw.to(kept)  # float16 may overflow until backward divides
        ctx.gradients = dx, dw
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # autograd would silently treat the gradients as constants
            raise RuntimeError(
                "chunked_linear_cross_entropy has no second derivatives: it was called with create_graph=True"
            )
        if ctx.gradients is None:
            raise RuntimeError("chunked_linear_cross_entropy: backward was called before, and gradients are kept once")
        found, ctx.gradients = ctx.gradients, None
        scaled = (None if x is None else x.mul_(gradients[0]) for x in found)  # in place: nothing else holds them
        return (*scaled, *[None] * 7)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, in this wider dtype if a GPU computes it."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda and a.dtype != dtype else a @ b


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the dtype of total, although a and b may be 16-bit."""
    if a.is_cuda and a.dtype != total.dtype:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
