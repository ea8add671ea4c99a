"""The base class of all parallel strategies: a module around the model, with the interface of the training loop."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cs336_basics.nn_utils import clip_gradient, gradient_norms

from ..machine.hardware import to_host
from . import comm


class Strategy(nn.Module):
    """The strategy `none` (one process, nothing to communicate), and the base of the others.

    At the start all ranks get rank 0's parameters and buffers. Gradients are averaged over ranks between `backward` and
    the optimizer's step. If ranks have different numbers of tokens, each multiplies its mean loss by
    `comm.mean_weight`. A parameter that no rank has used has no gradient afterwards. If only some ranks have used it,
    the others contribute zeros. Several models that share a backward pass belong in one module. Parameters that are
    added after wrapping are not averaged.

    Raises ValueError if the ranks' modules differ, if the module contains a strategy or is sharded by one, and for a
    grad_dtype in which gradients cannot be sent.
    """

    needs_float32 = False
    """Whether a 16-bit run gives the strategy float32 weights and leaves the casts to it or to autocast. Others get
    16-bit matrices, whose gradients may be float32 (`grad_dtype` of a parameter); the optimizer has the masters."""

    def __init__(self, module: nn.Module, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_communication_dtype("grad_dtype", grad_dtype)
        for name, inside in module.named_modules():
            if isinstance(inside, Strategy):
                where = f"its {name}" if name else "it"
                raise ValueError(f"module is a {type(module).__name__}: {where} is a {type(inside).__name__}, but a "
                                 "strategy goes around a whole model, once")  # fmt: skip
        self.module = module
        self.grad_dtype = grad_dtype
        self._synchronizing = True
        for name, p in module.named_parameters():
            if grad_dtype is not None and p.requires_grad and p.is_complex():
                raise ValueError(f"grad_dtype is {grad_dtype}: it must be None, for {name} is {p.dtype}")
            if is_shard(p):
                raise ValueError(f"{name} is this rank's part of a sharded parameter: a strategy needs whole ones")
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        comm.check_same({name: _describe(t) for name, t in tensors.items()}, "parameters")
        comm.broadcast([t.detach() for t in tensors.values()], "broadcast of the parameters")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy.deepcopy and torch.save call this too. A copy would have parameters without hooks.
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: copy its module before it is wrapped, "
                        "or save the result of full_state_dict")  # fmt: skip

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay on this process, for accumulation over micro-batches.

        `FSDP` and `SimpleFSDP` average them anyway.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Wait until gradients are averaged. Call it between the last backward and the optimizer's step.

        On a GPU it may return earlier, but work that is queued afterwards sees the averages.
        """

    def gradient_norm(self, square_sum: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """The 2-norm of the averaged gradients as a tensor, over the shards of all ranks, which call this together.

        square_sum(gradients): the sum of the squares of at least one gradient of this rank.
        """
        parameters = list(self.module.parameters())
        sharded = [p.grad for p in parameters if p.grad is not None and is_shard(p)]
        replicated = [p.grad for p in parameters if p.grad is not None and not is_shard(p)]
        total = torch.zeros((), device=parameters[0].device)
        if any(map(is_shard, parameters)):
            if sharded:
                total = square_sum(sharded)
            comm.mean([total], "norm of the gradients")
            total = total * comm.world_size()  # mean over ranks * world_size = sum over ranks
        if replicated:
            total = total + square_sum(replicated)
        return total.sqrt()

    def clip_gradient(self, max_norm: float = math.inf) -> Tensor:
        """Scale the averaged gradients to a common 2-norm of at most max_norm; return the norm before, as a tensor.

        All ranks call it together. Not called where the optimizer clips (`gradient_norm`).
        """
        parameters = list(self.module.parameters())
        if not any(map(is_shard, parameters)):
            return clip_gradient(parameters, max_norm)
        norm = self.gradient_norm(lambda gradients: torch.stack(gradient_norms(gradients)).square().sum())
        gradients = [p.grad for p in parameters if p.grad is not None]
        if max_norm != math.inf and gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Any]:
        """The state dict that a single process would have. All ranks call it together, outside a forward pass.

        Without to_rank all ranks get it, on their devices; tensors that are whole already are returned as they are.
        With to_rank that rank gets copies in main memory, the others get {}, and no device holds more than one gathered
        block at a time.
        """

        def keep(tensor: Tensor) -> Tensor:
            if to_rank is None:
                return tensor
            if to_rank == comm.rank():
                return tensor.to("cpu", copy=True)
            if tensor.is_cuda:
                # Stay in step with the rank that copies, or the next transfer's time limit begins before its turn.
                torch.cuda.current_stream(tensor.device).synchronize()
            return tensor.new_empty(0)

        state = self.module.state_dict(keep_vars=True)  # the parameters themselves, so that a tied weight is one tensor
        # Other entries, of `get_extra_state`, are whole on each rank.
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        whole = self._gather_whole(list(dict.fromkeys(tensors)), keep)
        if to_rank not in (None, comm.rank()):
            return {}
        return {name: whole[value] if isinstance(value, Tensor) else value for name, value in state.items()}

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        """Map each tensor of the state dict to `keep` of the whole tensor, which nothing else may hold."""
        return {part: keep(part.detach()) for part in parts}

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        """The sharded parameters by name: the whole shape, and the first row that this rank has."""
        return {}

    def gathered_bytes(self) -> int:
        """Bytes of the weights that are whole at the moment or being gathered, besides this rank's shards of them."""
        return 0

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded, so that the module can only be called on all ranks together."""
        return bool(self.shards())

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that require gradients, each once, in the order of registration."""
        return [p for p in self.module.parameters() if p.requires_grad]


def check_communication_dtype(name: str, dtype: Any) -> None:
    """Raise ValueError for a dtype in which gradients and weights cannot be sent."""
    known = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if not any(dtype is one for one in known):
        raise ValueError(f"{name} is {dtype!r}: it must be one of {', '.join(map(str, known))}")


def _describe(t: Tensor) -> str:
    frozen = "frozen " if isinstance(t, nn.Parameter) and not t.requires_grad else ""
    where = " on meta, without values" if t.is_meta else ""
    strides = t.stride() if t.layout is torch.strided else t.shape
    expanded = [i for i, (size, stride) in enumerate(zip(t.shape, strides, strict=True)) if size > 1 and stride == 0]
    how = f", expanded along {', '.join(map(str, expanded))}" if expanded else ""
    return f"{frozen}{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{how}{where}"


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a bound method without keeping its object alive: the collector cannot see parameters' hooks."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return hook


def mark_as_shard(parameter: Tensor) -> None:
    """Mark a parameter as this rank's shard, for `is_shard`."""
    parameter._is_shard = True  # type: ignore[attr-defined]


def is_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a shard, of this project's `FSDP` or of PyTorch's `fully_shard`."""
    return getattr(parameter, "_is_shard", False) or hasattr(parameter, "device_mesh")


class UsedParameters:
    """Tracks which parameters any rank has used.

    A rank that has not used a parameter sends zeros in place of its gradient, and reads from a flag beside the
    gradients whether any rank has used it.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._missing: list[int] = []
        self._flags = torch.ones(len(parameters), device=parameters[0].device if parameters else None)

    def fill_missing_gradients(self, is_missing: Callable[[nn.Parameter], bool] = lambda p: p.grad is None) -> Tensor:
        """Put zeros where there is no gradient; return the flags, to be averaged with the gradients."""
        self._missing = [i for i, p in enumerate(self._parameters) if is_missing(p)]
        self._flags.fill_(1)
        for i in self._missing:
            p = self._parameters[i]
            self._flags[i] = 0
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=p.grad_dtype)
        return self._flags

    def drop_unused_gradients(self) -> None:
        """After the flags are averaged: drop the gradients of parameters that no rank has used."""
        if self._missing:
            used = to_host(self._flags).tolist()
            for i in self._missing:
                if not used[i]:
                    self._parameters[i].grad = None
