"""The base of all strategies: a module around a module, and the contract that the training loop relies on."""

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
    """The strategy `none` (one process, nothing to communicate), and what the other strategies have in common.

    At the start all ranks get rank 0's parameters and buffers. Gradients are averaged over ranks between `backward` and
    the optimizer's step. If ranks have different numbers of tokens, each multiplies its mean loss by
    `comm.mean_weight`. A parameter that no rank has used has no gradient afterwards. One that
    only some ranks have used has one, to which the others contribute zeros.

    Gradients are those that a backward pass leaves. One backward pass goes through one strategy, so several models that
    share it belong in one module. A strategy does not know parameters that are added later.

    A strategy cannot be copied or pickled, because its hooks are on the parameters that it was given. What
    `full_state_dict` returns can be, and so can its `module`, unless that is sharded.

    Raises ValueError if the ranks' modules differ, for a module that contains a strategy or that one has sharded, and
    for a grad_dtype in which gradients cannot be sent.
    """

    def __init__(self, module: nn.Module, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_wire_dtype("grad_dtype", grad_dtype)
        for name, inside in module.named_modules():
            if isinstance(inside, Strategy):
                where = f"its {name}" if name else "it"
                raise ValueError(f"module is a {type(module).__name__}: {where} is a {type(inside).__name__}, and a "
                                 "strategy goes around a whole model, once")  # fmt: skip
        self.module = module
        self.grad_dtype = grad_dtype
        self._synchronizing = True
        for name, p in module.named_parameters():
            if grad_dtype is not None and p.requires_grad and p.is_complex():
                raise ValueError(f"grad_dtype is {grad_dtype}: it must be None, for {name} is {p.dtype}")
            if is_part(p):
                raise ValueError(f"{name} is this rank's part of a sharded parameter: a strategy needs whole ones")
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        comm.check_same({name: _describe(t) for name, t in tensors.items()}, "parameters")
        comm.broadcast([t.detach() for t in tensors.values()], "broadcast of the parameters")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copy.deepcopy and torch.save call this too. A copy would have parameters without hooks.
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: its module can, before it is wrapped, "
                        "and so can what full_state_dict gives")  # fmt: skip

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients made inside stay on this process, for accumulation over micro-batches (except with `FSDP`)."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def finish_gradient_synchronization(self) -> None:
        """Return when gradients are averaged. To be called between the last backward and the optimizer's step.

        On a GPU, "returns" means that work queued after it sees the averages.
        """

    def clip_gradient(self, max_norm: float = math.inf) -> Tensor:
        """Scale the averaged gradients to a common 2-norm of at most max_norm; return the norm before, as a tensor.

        With sharded weights it is the norm over the shards of all ranks, which call this together.
        """
        parameters = list(self.module.parameters())
        if not any(map(is_part, parameters)):
            return clip_gradient(parameters, max_norm)
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}  # of shards, and of replicated parameters
        for p in parameters:
            if p.grad is not None:
                gradients[is_part(p)].append(p.grad)
        squares = {}
        for kind, some in gradients.items():
            norms = gradient_norms(some) if some else [torch.zeros((), device=parameters[0].device)]
            squares[kind] = torch.stack(norms).square().sum()
        comm.mean([squares[True]], "norm of the gradients")
        norm = (squares[True] * comm.world_size() + squares[False]).sqrt()
        if max_norm != math.inf and (everything := gradients[True] + gradients[False]):
            torch._foreach_mul_(everything, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Any]:
        """The state dict that a single process would have. All ranks call it together, outside a forward pass.

        Without to_rank all ranks get it, on their devices; tensors that are whole already are returned as they are.
        With to_rank that rank gets copies in main memory, which may hold more than its GPU can, and the others get {}:
        of a sharded module they hold no more whole at a time than what is sent together, a block.

        Raises ValueError if there is no such rank.
        """
        parts = self.module.state_dict(keep_vars=True)  # themselves, not views, so that a tied weight is one tensor
        # Other entries of a module (`get_extra_state`) are whole on each rank.
        tensors = [part for part in parts.values() if isinstance(part, Tensor)]
        whole = self._gather_whole(list(dict.fromkeys(tensors)), _keep_on(to_rank))
        if to_rank not in (None, comm.rank()):
            return {}
        return {name: whole[part] if isinstance(part, Tensor) else part for name, part in parts.items()}

    def _gather_whole(self, parts: Sequence[Tensor], keep: Callable[[Tensor], Tensor]) -> dict[Tensor, Tensor]:
        """Map each tensor of the state dict to what `keep` returns for it whole; nothing else holds the whole one."""
        return {part: keep(part.detach()) for part in parts}

    def shards(self) -> dict[str, tuple[torch.Size, int]]:
        """The parameters of which this rank has only some rows, by name: the whole shape, and the first row it has."""
        return {}

    def gathered_bytes(self) -> int:
        """Bytes of weights that are whole at the moment, besides this rank's own part of them."""
        return 0

    @property
    def sharded(self) -> bool:
        """Whether the module on this rank is not whole, so that it can only be called on all ranks together."""
        return bool(self.shards())

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that have gradients, each once, in the order in which the module registered them."""
        return [p for p in self.module.parameters() if p.requires_grad]


def check_wire_dtype(name: str, dtype: Any) -> None:
    """Raise ValueError for a dtype in which neither gradients nor weights can be sent."""
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


def _keep_on(rank: int | None) -> Callable[[Tensor], Tensor]:
    """What to keep of a whole tensor: itself or, given a rank, a copy in main memory there and nothing elsewhere."""
    if rank is None:
        return lambda tensor: tensor
    if not 0 <= rank < comm.world_size():
        raise ValueError(f"to_rank is {rank}: there are ranks 0 to {comm.world_size() - 1}")
    if rank == comm.rank():
        return lambda tensor: tensor.to("cpu", copy=True)

    def forget(tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            # Stay in step with the rank that copies, or the next transfer's time limit begins before its turn.
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor.new_empty(0)

    return forget


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a hook of a bound method that does not keep its object alive, and does nothing once that is gone.

    A parameter holds its hooks where Python's garbage collector cannot see them. So a strategy that they hold would
    never be freed, because it holds the parameter in turn.
    """
    reference = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return hook


def mark_as_part(parameter: Tensor) -> None:
    """Mark a parameter as this rank's part of a sharded one, for `is_part`."""
    parameter._is_part_of_a_sharded_one = True  # type: ignore[attr-defined]


def is_part(parameter: Tensor) -> bool:
    """Whether other ranks have other parts of this parameter, by this project's `FSDP` or PyTorch's `fully_shard`."""
    return getattr(parameter, "_is_part_of_a_sharded_one", False) or hasattr(parameter, "device_mesh")


class UsedParameters:
    """Which parameters some rank has used; the ranks agree on it while the gradients are averaged.

    A rank that has not used a parameter sends zeros in place of its gradient, so that all ranks send the same tensors.
    Whether any rank has used it is sent as a flag, which only a rank that has not used it waits for.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self._missing: list[int] = []
        self._flags = torch.ones(len(parameters), device=parameters[0].device if parameters else None)

    def fill(self, is_missing: Callable[[nn.Parameter], bool] = lambda p: p.grad is None) -> Tensor:
        """Put zeros where there is no gradient; return the flags, to be averaged with the gradients."""
        self._missing = [i for i, p in enumerate(self._parameters) if is_missing(p)]
        self._flags.fill_(1)
        for i in self._missing:
            p = self._parameters[i]
            self._flags[i] = 0
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return self._flags

    def settle(self) -> None:
        """After the flags are averaged: drop the gradients of parameters that no rank has used."""
        if self._missing:
            used = to_host(self._flags).tolist()
            for i in self._missing:
                if not used[i]:
                    self._parameters[i].grad = None
