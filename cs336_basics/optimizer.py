"""AdamW, Muon's orthogonalisation and the learning-rate schedules, written to be read."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, Algorithm 2; its decay is lr * weight_decay, as in
    PyTorch).

    For each parameter p with gradient g, at step t:

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) - lr weight_decay p
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            # Same names and types as in torch.optim.AdamW, so one checkpoint works with both.
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        assert p.grad is not None
        hyper = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
        update(p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"].item(), *hyper)


def update(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW's step t, from 1, of one parameter in place: p with gradient g and moments m and v, all of one shape."""
    beta1, beta2 = betas
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - lr * weight_decay)
    denominator = (v.sqrt() / math.sqrt(1 - beta2**t)).add_(eps)
    p.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))


NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrices: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows columns"]:
    """U V^T of each matrix U S V^T, approximately and in bfloat16 (Jordan et al. 2024, "Muon").

    A step of the Newton-Schulz iteration takes each singular value s to a s + b s^3 + c s^5, by matrix products alone.
    These coefficients make small values grow fast. After five steps most values are between 0.7 and 1.2, which serves
    an update as well as 1. Products are in bfloat16 on a GPU and in float32 on a CPU, which is faster there.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    rows, columns = matrices.shape[-2:]
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32).reshape(-1, rows, columns)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT) if rows <= columns else torch.bmm(x.mT, x)  # the smaller one
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((polynomial, x) if rows <= columns else (x, polynomial)), beta=a)
    return x.view(matrices.shape).bfloat16()


def get_cosine_lr(step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int) -> float:
    """Learning rate at `step` (from 0): linear warm-up, a half cosine down, then constant.

    It rises linearly to max_lr over warmup_steps, falls along a half cosine to min_lr at total_steps, and stays at
    min_lr after that (Loshchilov & Hutter 2017, SGDR, equation 5, one cycle, with warm-up).
    """
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if step >= total_steps:
        return min_lr
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return min_lr + 0.5 * (max_lr - min_lr) * (1 + math.cos(math.pi * progress))


def get_wsd_lr(step: int, max_lr: float, min_lr: float, warmup_steps: int, total_steps: int, decay_steps: int) -> float:
    """Learning rate at `step` (from 0): linear warm-up, stable at max_lr, linear decay (Hu et al. 2024, MiniCPM).

    It falls to min_lr over the last decay_steps before total_steps, and stays there. decay_steps 0: it never falls.
    """
    if step < warmup_steps:
        return max_lr * step / warmup_steps
    if decay_steps == 0:
        return max_lr
    left = min(max(total_steps - step, 0) / decay_steps, 1.0)
    return min_lr + (max_lr - min_lr) * left
