"""Turns a pair of functions, a forward and a backward pass, into what PyTorch needs of a flash kernel.

`flash_function` makes the `autograd.Function` of a kernel and registers both passes as custom operators. Operators are
what torch.compile (then without a graph break), fake tensors and the FLOP counter work with.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from .contract import attention_flops, check_is_causal, check_qkv, check_tensors

Forward = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""forward(q, k, v, is_causal) -> o, logsumexp"""


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    logsumexp: Tensor
    is_causal: bool


Backward = Callable[[Tensor, Saved, bool, bool], tuple[Tensor, Tensor, Tensor]]
"""backward(dO, saved, need_dq, need_dkv) -> dq, dk, dv, as from `new_gradients`: those not needed have no elements.
It is called with at least one query and one key, a dO without repeated elements and a contiguous logsumexp."""
Check = Callable[[Tensor, Tensor, Tensor, bool], None]

_places: dict[str, str] = {}
"""Each name with the functions that it stands for."""


class FlashFunction(torch.autograd.Function):
    """Base of the classes that `flash_function` makes."""

    of: ClassVar[Any]
    """Like `apply`, but compiled as one operator: torch.compile does not accept a tensor twice in `apply`."""


def flash_function(
    name: str, forward_pass: Forward, backward_pass: Backward, check: Check = check_qkv
) -> type[FlashFunction]:
    """The autograd.Function of a kernel: `.apply(Q, K, V, is_causal=False)` returns O, and so does `.of`.

    It saves Q, K, V, O and the logsumexp, of shape Q.shape[:-1] in float32 (float64 for float64), for backward.
    Registers the operators `cs336::{name}_forward` and `cs336::{name}_backward`. Eager calls run the kernel directly,
    because the dispatch of a custom operator costs more than the launch of a small kernel. forward_pass checks its
    arguments; `check` does so for tensors without values, and may look only at their shape, dtype and device.

    Raises ValueError for a name that is not an identifier or that another function has.
    """
    place = f"{_place(forward_pass)} and {_place(backward_pass)}"
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"name is {name!r}: it must be an identifier")
    if _places.setdefault(name, place) != place:  # redefined functions, as in a notebook, are the same
        raise ValueError(f"name is {name!r}, which is the name of {_places[name]}")
    forward_op, backward_op = _register_operators(name, forward_pass, backward_pass, check)

    class FlashAttention(FlashFunction):
        @classmethod
        def of(cls, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
            if torch.compiler.is_compiling():
                return forward_op(Q, K, V, is_causal)[0]
            return cls.apply(Q, K, V, is_causal)

        @staticmethod
        def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
            if _traced():
                o, logsumexp = forward_op(Q, K, V, is_causal)
            else:
                o, logsumexp = _run_forward(forward_pass, Q, K, V, is_causal)
            ctx.save_for_backward(Q, K, V, o, logsumexp)
            ctx.is_causal = is_causal
            return o

        @staticmethod
        def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
            _check_not_differentiated_again(name)
            need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
            needs = need_dq, need_dk or need_dv
            q, k, v, o, logsumexp = ctx.saved_tensors
            saved = Saved(q, k, v, o, logsumexp, ctx.is_causal)
            if _traced():
                dQ, dK, dV = backward_op(dO, *saved, *needs)
            else:
                dQ, dK, dV = _run_backward(backward_pass, dO, saved, *needs)
            return dQ if need_dq else None, dK if need_dk else None, dV if need_dv else None, None

    # The class gets this name because a tensor's grad_fn shows it.
    return type(name, (FlashAttention,), {"__doc__": f"FlashAttention-2 as an autograd.Function: `{name}`."})


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"


def _traced() -> bool:
    """Whether something observes the operators that run: torch.compile, fake tensors, the FLOP counter."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _check_not_differentiated_again(name: str) -> None:
    # Autograd would silently treat the gradients as constants.
    if torch.is_grad_enabled() and not _traced():
        raise RuntimeError(f"{name} has no second derivatives: its backward pass was called with create_graph=True")


def _register_operators(
    name: str, forward: Forward, backward: Backward, check: Check
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    @torch.library.custom_op(f"cs336::{name}_forward", mutates_args=())
    def forward_op(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        return _run_forward(forward, q, k, v, is_causal)

    @torch.library.custom_op(f"cs336::{name}_backward", mutates_args=())
    def backward_op(
        dO: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
        need_dq: bool,
        need_dkv: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _run_backward(backward, dO, Saved(q, k, v, o, logsumexp, is_causal), need_dq, need_dkv)

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():  # it would change the error; the kernel raises it when it runs
            check(q, k, v, is_causal)
        return new_outputs(q)

    @backward_op.register_fake
    def _(dO: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        *_, need_dq, need_dkv = rest
        return new_gradients(q, k, v, need_dq, need_dkv)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, is_causal = inputs
        o, logsumexp = output
        ctx.mark_non_differentiable(logsumexp)
        ctx.save_for_backward(q, k, v, o, logsumexp)
        ctx.is_causal = is_causal

    def op_backward(ctx: Any, dO: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        _check_not_differentiated_again(name)
        need_dq, need_dk, need_dv, _ = ctx.needs_input_grad
        dq, dk, dv = backward_op(dO, *ctx.saved_tensors, ctx.is_causal, need_dq, need_dk or need_dv)
        return dq if need_dq else None, dk if need_dk else None, dv if need_dv else None, None

    forward_op.register_autograd(op_backward, setup_context=setup_context)
    operators = torch.ops.cs336

    @register_flop_formula(getattr(operators, f"{name}_forward"))
    def _(q_shape: Any, k_shape: Any, v_shape: Any, is_causal: bool, *args: Any, **kwargs: Any) -> int:
        return attention_flops(q_shape, k_shape[-2], is_causal, products=2)

    @register_flop_formula(getattr(operators, f"{name}_backward"))
    def _(*shapes_and_flags: Any, **kwargs: Any) -> int:
        _, q_shape, k_shape, _, _, _, is_causal, need_dq, need_dkv = shapes_and_flags
        products = 2 + need_dq + 2 * need_dkv  # the scores and dP for any of them, then dQ, then dK and dV
        return attention_flops(q_shape, k_shape[-2], is_causal, products)

    return forward_op, backward_op


def _run_forward(forward: Forward, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """A kernel's forward pass, with what a kernel misses that remembers its checks or reads memory directly."""
    check_is_causal(is_causal)
    try:
        if q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        return forward(q, k, v, is_causal)
    except (AttributeError, RuntimeError):  # checked beforehand, every launch would take a microsecond longer
        check_tensors(q, k, v)
        raise


def _run_backward(
    backward: Backward, dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A kernel's backward pass, after handling the cases that are the same for all kernels."""
    q, k, v = saved[:3]
    if dO.is_neg() or q.is_neg() or k.is_neg() or v.is_neg():  # lazily negated: memory has the other sign
        dO, q, k, v = (x.resolve_neg() for x in (dO, q, k, v))
        saved = saved._replace(q=q, k=k, v=v)
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
        return dq.zero_(), dk.zero_(), dv.zero_()
    if dO.stride(-1) != 1 or 0 in dO.stride():
        dO = dO.contiguous()  # sum().backward() gives one number, expanded: slow to read, unusable for descriptors
    if not saved.logsumexp.is_contiguous():  # saved-tensor hooks may have changed it
        saved = saved._replace(logsumexp=saved.logsumexp.contiguous())
    return backward(dO, saved, need_dq, need_dkv)


def empty_outputs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """o and logsumexp if there are no queries or no keys (0 and -inf); None if there is work to do."""
    if q.numel() and k.numel():
        return None
    o, logsumexp = new_outputs(q)
    return o.zero_(), logsumexp.fill_(float("-inf"))


def new_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised o, with q's memory layout, and logsumexp, of q's shape without the head size."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _unfilled_like(q), torch.empty(q.shape[:-1], dtype=wide, device=q.device)


def new_gradients(q: Tensor, k: Tensor, v: Tensor, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv, with the memory layouts of q, k, v; those that are not needed have no elements."""
    dq = _unfilled_like(q) if need_dq else q.new_empty(0)
    if not need_dkv:
        return dq, k.new_empty(0), v.new_empty(0)
    return dq, _unfilled_like(k), _unfilled_like(v)


def _unfilled_like(x: Tensor) -> Tensor:
    # A kernel writes through as_4d, which is a view of five dimensions only if the leading ones are in order in memory.
    return torch.empty_like(x) if x.ndim <= 4 else torch.empty_like(x, memory_format=torch.contiguous_format)
