"""Softmax, cross-entropy and gradient clipping, written out."""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def softmax(x: Float[Tensor, "..."], dim: int = -1) -> Float[Tensor, "..."]:
    """exp(x) normalised to sum to 1 along `dim`. The largest entry is subtracted first, so exp cannot overflow."""
    exponential = (x - x.amax(dim=dim, keepdim=True)).exp()
    return exponential / exponential.sum(dim=dim, keepdim=True)


def cross_entropy(
    logits: Float[Tensor, "... vocab"], targets: Int[Tensor, "..."], reduction: str = "mean"
) -> Float[Tensor, "..."]:
    """-log softmax(logits)[target] in nats, over any leading dimensions, computed in float32 (float64 stays).

    reduction: "mean" or "sum" over all targets, or "none" for one value per target.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: it must be 'mean', 'sum' or 'none'")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    loss = logits.logsumexp(dim=-1) - chosen
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" else loss.sum()


def linear_cross_entropy(
    x: Float[Tensor, "... d"],
    weight: Float[Tensor, "vocab d"],
    targets: Int[Tensor, "..."],
    reduction: str = "mean",
) -> Float[Tensor, "..."]:
    """The cross-entropy of the logits x W^T, computed as written: all logits are in memory at once.

    `cs336_systems.kernels.linear_cross_entropy.chunked_linear_cross_entropy` computes the same, some tokens at a time.
    """
    return cross_entropy(nn.functional.linear(x, weight), targets, reduction)


def gradient_norms(gradients: list[Tensor]) -> list[Float[Tensor, ""]]:
    """The 2-norm of each gradient, in float32 or wider, because bfloat16 is too coarse for a sum of squares."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(torch.promote_types(gradient.dtype, torch.float32), []).append(gradient)
    norms = (torch._foreach_norm(some, 2, dtype=dtype) for dtype, some in by_dtype.items())
    return [norm for some in norms for norm in some]


def clip_gradient(parameters: Iterable[nn.Parameter], max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients in place so that their global 2-norm is at most max_norm (Pascanu et al. 2013).

    Returns the norm before clipping as a tensor on the gradients' device, so that only a caller who reads it waits for
    the device. max_norm = inf only measures the norm.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(gradient_norms(gradients)))
    if max_norm != float("inf"):
        # 1e-6, as in torch.nn.utils.clip_grad_norm_, avoids a division by a norm of zero.
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
