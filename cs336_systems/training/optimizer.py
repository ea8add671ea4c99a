"""The optimizer of 16-bit training: the model has 16-bit weights, and the optimizer has their float32 masters.

Micikevicius et al. 2018, "Mixed Precision Training". A step reads the gradients twice, once for their norm and once for
the update, which also clips them and writes the 16-bit weights. The decision to skip a step stays on the device.

A bfloat16 weight is its master rounded, the upper half; the optimizer keeps only the lower half.
"""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cs336_basics.nn_utils import gradient_norms
from cs336_basics.optimizer import get_cosine_lr, get_wsd_lr, update

from ..config.run import RunConfig
from ..parallel.strategy import Strategy

MASTER = "master"
"""Name of the state that holds the float32 weights of a float16 parameter."""
LOWER_HALF = "lower_half"
"""Name of the state that holds the lower halves of the float32 weights of a bfloat16 parameter: see `halves`."""
SMALLEST_LOSS_SCALE = 2.0**-10


def halves(weights: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
    """The upper halves of float32 weights, rounded to bfloat16, and the lower halves, int16.

    A lower half is what rounding took away, in units of float32's last bit: -2^15 to 2^15. A tie that is rounded down
    leaves 2^15, which is no int16 and becomes 2^15 - 1. So one weight of random bits in 131,072 loses one unit.
    """
    upper = weights.to(torch.bfloat16)
    lower = weights.view(torch.int32) - (upper.view(torch.int16).to(torch.int32) << 16)
    return upper, lower.clamp(max=2**15 - 1).to(torch.int16)


def joined(weight: Tensor, rest: Tensor) -> Float[Tensor, "..."]:
    """The float32 weights of a parameter. rest: the lower halves, or the float32 weights themselves."""
    if rest.dtype != torch.int16:
        return rest
    upper = weight.view(torch.int16).to(torch.int32) << 16
    # If something else has set a weight to zero, an old lower half below zero would make it NaN.
    return (upper + torch.where(weight == 0, rest.clamp(min=0), rest)).view(torch.float32)


def assign(weights: Float[Tensor, "..."], weight: Tensor, rest: Tensor) -> None:
    """Store float32 weights: rounded in the parameter, and in `rest` what `joined` needs beside it."""
    weight.copy_(weights)
    rest.copy_(halves(weights)[1] if rest.dtype == torch.int16 else weights)


def rest_of(p: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """What `joined` needs of a parameter beside it: lower halves, float32 weights, or a float32 parameter itself."""
    return state.get(LOWER_HALF, state.get(MASTER, p.detach()))


class GradientScale:
    """The factor of a step's gradients, on the device: clipping, the inverse loss scale, or 0 to skip the step.

    With `scales_loss` (for fp16) the loss is scaled so that small gradients do not vanish. The scale is halved whenever
    a step is skipped and doubled after GROWTH_INTERVAL steps without one, as in `torch.amp.GradScaler`.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, device: torch.device, max_norm: float = math.inf, scales_loss: bool = False) -> None:
        self.factor = torch.zeros((), device=device)
        self._max_norm = max_norm
        self._loss_scale = torch.tensor(2.0**16, device=device) if scales_loss else None
        self._good_steps = torch.zeros((), device=device)  # since the scale changed
        self._tables: dict[Any, Any] = {}  # of the kernels

    @property
    def loss_scale(self) -> float | None:
        """The scale of the next loss, None if losses are not scaled. Waits for the device."""
        return None if self._loss_scale is None else self._loss_scale.item()

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss for the backward pass."""
        return loss if self._loss_scale is None else loss * self._loss_scale

    @torch.no_grad()
    def decide(self, loss: Tensor, strategy: Strategy) -> Tensor:
        """Set `factor` for the averaged gradients; return their norm before clipping.

        loss: the mean over all ranks. The step is skipped if loss or norm are not finite. All ranks call it together.
        """
        norm = strategy.gradient_norm(self._square_sum)
        scale = self._loss_scale
        if scale is not None:
            norm = norm / scale
        finite = norm.isfinite() & loss.isfinite()
        factor = torch.ones_like(norm)
        if self._max_norm != math.inf:  # as in clip_gradient; never 0, which means to skip
            factor = (self._max_norm / (norm + 1e-6)).clamp(min=1e-30, max=1.0)
        self.factor.copy_(torch.where(finite, factor if scale is None else factor / scale, 0.0))
        if scale is not None:
            self._good_steps.add_(1).mul_(finite)
            grows = self._good_steps == self.GROWTH_INTERVAL
            self._good_steps.mul_(~grows)
            scale.mul_(torch.where(finite, 1.0 + grows, 0.5))
        return norm

    def _square_sum(self, gradients: list[Tensor]) -> Tensor:
        parts = [in_memory(g) for g in gradients]
        if self.factor.is_cuda:
            from ..kernels.adamw import square_sum  # Triton is only there on Linux

            return square_sum(parts, self._tables)
        return torch.linalg.vector_norm(torch.stack(gradient_norms(parts))).square()

    def state_dict(self) -> dict[str, Any]:
        """The loss scale under GradScaler's names, {} without one."""
        if self._loss_scale is None:
            return {}
        return {"scale": self._loss_scale.item(), "_growth_tracker": int(self._good_steps.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a loss scale, also one of a GradScaler; nothing if losses are not scaled or `state` is empty."""
        if self._loss_scale is not None and state:
            self._loss_scale.fill_(state["scale"])
            self._good_steps.fill_(state["_growth_tracker"])


class FusedAdamW(torch.optim.Optimizer):
    """AdamW whose update, clipping and 16-bit weights are one pass over memory, by `kernels.adamw`.

    masters: the float32 weights of the 16-bit parameters, which are taken out of it. They become the state MASTER or
    LOWER_HALF; any other parameter is float32, and its own master. All state exists from the beginning and stays where
    it is, so that a step can be recorded in a CUDA graph: load state into its tensors. `lr` of the groups is a float64
    tensor, on a CUDA device if the parameters are. factor: `GradientScale.factor`; where it is 0, a step changes
    nothing. To change a float16 weight, change its master: a step computes the weight from it.

    Raises ValueError for a 16-bit parameter without master, and for one that is not contiguous.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        factor: Tensor,
        masters: MutableMapping[nn.Parameter, Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self._factor, self._masters = factor, masters
        self._tables: dict[Any, Any] = {}  # of the kernels
        lr_tensor = torch.tensor(lr, dtype=torch.float64, device=factor.device if factor.is_cuda else "cpu")
        super().__init__(params, dict(lr=lr_tensor, betas=betas, eps=eps, weight_decay=weight_decay))
        self._state_at_start = self.state

    def __reduce_ex__(self, protocol: Any) -> Any:  # copy.deepcopy and torch.save call this too
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: save its state_dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            master = self._masters.pop(p, None)
            if (p if master is None else master).dtype != torch.float32 or not local_part(p).is_contiguous():
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is {p.dtype}: it must be contiguous, and "
                                 "float32 or have a float32 master")  # fmt: skip
            self.state[p] = self._initial_state(p, group)
            if master is not None:
                is_half = p.dtype == torch.bfloat16
                self.state[p] |= {LOWER_HALF: halves(master)[1]} if is_half else {MASTER: master}

    def _initial_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=p.device), **moments}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.state is not self._state_at_start:
            raise RuntimeError("the state of a FusedAdamW was replaced: load state into its tensors")
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update the parameters of a group that have gradients."""
        states = [self.state[p] for p in parameters]
        counts = (self._factor > 0).to(torch.float32)
        # A list: a single tensor would be read by the host.
        torch._foreach_add_([state["step"] for state in states], [counts] * len(states))
        gradients = [in_memory(p.grad) for p in parameters]
        tensors = [
            [local_part(t) for t in (s["step"], rest_of(p, s), s["exp_avg"], s["exp_avg_sq"], p.detach())]
            for p, s in zip(parameters, states, strict=True)
        ]
        hyper = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        if self._factor.is_cuda:
            from ..kernels.adamw import adamw

            adamw(gradients, tensors, self._tables, factor=self._factor, **hyper)
        else:
            adamw_torch(gradients, tensors, factor=self._factor, **hyper)


def adamw_torch(
    gradients: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    *,
    factor: Tensor,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """`kernels.adamw.adamw` in plain PyTorch, with `cs336_basics.optimizer`'s arithmetic. Waits for the device."""
    if not factor > 0:
        return
    for gradient, (step, rest, m, v, weight) in zip(gradients, states, strict=True):
        g, weights = gradient.to(torch.float32) * factor, joined(weight, rest)
        update(weights, g, m, v, step.item(), lr.item(), betas, eps, weight_decay)
        if weight.dtype != torch.float32:
            assign(weights, weight, rest)


def learning_rate(config: RunConfig, step: int) -> float:
    """The learning rate of a step, counted from 1, in the configuration's schedule."""
    values = {name.removeprefix("optimizer."): value for name, value in config.schedule.items()}
    common = (step, values["lr"], values["min_lr"], values["warmup_steps"], values["cosine_steps"])
    if values["schedule"] == "cosine":
        return get_cosine_lr(*common)
    return get_wsd_lr(*common, values.get("decay_steps", 0))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, in the tensor where it is one, which a CUDA graph may read."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def in_memory(gradient: Tensor | None) -> Tensor:
    """This rank's part of a gradient, contiguous."""
    assert gradient is not None
    return local_part(gradient).contiguous()
