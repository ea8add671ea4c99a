"""One pair of functions, a forward and a backward pass, made into what PyTorch needs of a flash kernel.

`flash_function` gives the `autograd.Function` of a kernel and registers both passes as custom operators: the way in
for torch.compile, which then has no graph break, for fake tensors, and for the FLOP counter.
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
    """What the forward pass leaves to the backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    logsumexp: Tensor
    is_causal: bool


Backward = Callable[[Tensor, Saved, bool, bool], tuple[Tensor, Tensor, Tensor]]
"""backward(dO, saved, need_dq, need_dkv) -> dq, dk, dv, as from `new_gradients`: what is not needed has no elements.
Called with at least one query and one key, a dO without repeated elements and a contiguous logsumexp."""
Check = Callable[[Tensor, Tensor, Tensor, bool], None]

_places: dict[str, str] = {}
"""Of every name the functions that it is the name of."""


class FlashFunction(torch.autograd.Function):
    """What `flash_function` makes is a class of this kind."""

    of: ClassVar[Any]
    """As `apply`, and compiled as one operator: torch.compile does not take a tensor twice in `apply`."""


def flash_function(
    name: str, forward_pass: Forward, backward_pass: Backward, check: Check = check_qkv
) -> type[FlashFunction]:
    """The autograd.Function of a kernel: `.apply(Q, K, V, is_causal=False)` gives O, and so does `.of`.

    Saves Q, K, V, O and the logsumexp, of shape Q.shape[:-1] in float32 (float64 for float64), for backward.
    Registers the operators `cs336::{name}_forward` and `cs336::{name}_backward`. Called eagerly, the kernel is reached
    directly: the dispatch of a custom operator costs more than the launch of a small kernel. forward_pass checks its
    arguments; `check` does so for tensors without values, of which it may ask the shape, the dtype and the device.

    Raises ValueError for a name that is no identifier or that another function has.
    """
    place = f"{_place(forward_pass)} and {_place(backward_pass)}"
    if not (name.isascii() and name.isidentifier()):
        raise ValueError(f"name is {name!r}: it must be an identifier")
    if _places.setdefault(name, place) != place:  # functions defined anew, as in a notebook, are the same
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

    # A class of this name, which a tensor's grad_fn shows.
    return type(name, (FlashAttention,), {"__doc__": f"FlashAttention-2 as an autograd.Function: `{name}`."})


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"


def _traced() -> bool:
    """Whether someone looks at operators rather than at results: torch.compile, fake tensors, the FLOP counter."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _check_not_differentiated_again(name: str) -> None:
    # Autograd would take the gradients for constants and go on without a word.
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
        if not torch.compiler.is_compiling():  # which would make another error of it: the kernel raises it when it runs
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
        products = 2 + need_dq + 2 * need_dkv  # the scores and dP for either, then dQ, or dK and dV
        return attention_flops(q_shape, k_shape[-2], is_causal, products)

    return forward_op, backward_op


def _run_forward(forward: Forward, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """A kernel's forward pass, for arguments of which it remembers what it has checked, or reads the memory."""
    check_is_causal(is_causal)
    try:
        is_negated = q.is_neg() or k.is_neg() or v.is_neg()
    except AttributeError:
        check_tensors(q, k, v)
        raise
    if is_negated:
        q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    return forward(q, k, v, is_causal)


def _run_backward(
    backward: Backward, dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A kernel's backward pass, without the cases that are the same for all of them."""
    q, k, v = saved[:3]
    if dO.is_neg() or q.is_neg() or k.is_neg() or v.is_neg():  # to be read with the other sign than memory has
        dO, q, k, v = (x.resolve_neg() for x in (dO, q, k, v))
        saved = saved._replace(q=q, k=k, v=v)
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
        return dq.zero_(), dk.zero_(), dv.zero_()
    if dO.stride(-1) != 1 or 0 in dO.stride():
        dO = dO.contiguous()  # what sum().backward() gives is one number, expanded: slow to read, not for descriptors
    if not saved.logsumexp.is_contiguous():  # hooks of saved tensors may have given another
        saved = saved._replace(logsumexp=saved.logsumexp.contiguous())
    return backward(dO, saved, need_dq, need_dkv)


def empty_outputs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """o and logsumexp where there is no query, or no key to see (0 and -inf); None where there is work to do."""
    if q.numel() and k.numel():
        return None
    o, logsumexp = new_outputs(q)
    return o.zero_(), logsumexp.fill_(float("-inf"))


def new_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Unfilled o, laid out in memory as q is, and logsumexp, of q's shape without the head size."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _unfilled_like(q), torch.empty(q.shape[:-1], dtype=wide, device=q.device)


def new_gradients(q: Tensor, k: Tensor, v: Tensor, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unfilled dq, dk, dv, laid out in memory as q, k, v are; of no elements where they are not needed."""
    dq = _unfilled_like(q) if need_dq else q.new_empty(0)
    if not need_dkv:
        return dq, k.new_empty(0), v.new_empty(0)
    return dq, _unfilled_like(k), _unfilled_like(v)


def _unfilled_like(x: Tensor) -> Tensor:
    # A kernel writes through as_4d, which is a view of five dimensions only where the leading ones lie in order.
    return torch.empty_like(x) if x.ndim <= 4 else torch.empty_like(x, memory_format=torch.contiguous_format)
