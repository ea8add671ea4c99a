"""Makes an attention kernel from two functions, its forward and its backward pass.

`flash_function` returns the kernel's `autograd.Function` and registers both passes as custom operators. Operators make
torch.compile work without a graph break, and fake tensors and the FLOP counter work at all.

The calls from a kernel's name to the GPU: `flash_triton` -> `FlashAttention.call` -> `FlashAttention.forward` ->
`_run_forward` -> `flash_forward`, the kernel's own function -> `Launch`.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from .contract import Band, attention_flops, check_band, check_is_causal, check_qkv, check_tensors

Forward = Callable[..., tuple[Tensor, Tensor]]
"""forward(q, k, v, is_causal) -> o, logsumexp. A kernel for windows and documents gets the band as a fifth argument in
calls that have one."""


class Saved(NamedTuple):
    """Values that the forward pass saves for the backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    logsumexp: Tensor
    is_causal: bool
    band: Band | None = None


Backward = Callable[[Tensor, Saved, bool, bool], tuple[Tensor, Tensor, Tensor]]
"""backward(dO, saved, need_dq, need_dkv) -> dq, dk, dv, made by `new_gradients`: those not needed have no elements.
There is at least one query and one key. dO has adjacent columns (its last stride is 1) and no repeated elements.
logsumexp is contiguous."""
Check = Callable[[Tensor, Tensor, Tensor, bool], None]


class FlashFunction(torch.autograd.Function):
    """Base of the classes that `flash_function` makes."""

    call: ClassVar[Any]
    """`apply` in eager mode. Under torch.compile it calls the custom operator, because Dynamo rejects an `apply` whose
    inputs repeat a tensor."""


def flash_function(
    name: str, forward_pass: Forward, backward_pass: Backward, check: Check = check_qkv
) -> type[FlashFunction]:
    """The autograd.Function of a kernel: `.apply(Q, K, V, is_causal=False)` returns O, and so does `.call`.

    For backward it saves Q, K, V, O and the logsumexp, of shape Q.shape[:-1] in float32 (float64 for float64).
    Registers the operators `cs336::{name}_forward` and `cs336::{name}_backward`. Eager mode: FlashAttention's `forward`
    and `backward` run the kernel directly, because the dispatch of a custom operator takes longer than the launch of a
    small kernel. torch.compile of `.call`: the operators run, with `op_backward`. Fake tensors, the FLOP counter and
    torch.compile of `.apply`: FlashAttention calls the operators.

    forward_pass checks its arguments; `check` checks fake tensors, and may look only at their shape, dtype and device.
    """
    forward_op, backward_op = _register_operators(name, forward_pass, backward_pass, check)
    run_backward = functools.partial(_run_backward, backward_pass)

    class FlashAttention(FlashFunction):
        @classmethod
        def call(cls, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False, band: Band | None = None) -> Tensor:
            if band is not None:
                check_qkv(Q, K, V, is_causal)
                window = check_band(Q, K, is_causal, band)
                band = None if window is None and band.starts is None else Band(window, band.starts, band.ends)
            if torch.compiler.is_compiling():
                return forward_op(Q, K, V, is_causal, *(band or ()))[0]
            return cls.apply(Q, K, V, is_causal, *(band or ()))

        @staticmethod
        def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False, *band: Any) -> Tensor:
            if _traced():
                o, logsumexp = forward_op(Q, K, V, is_causal, *band)
            else:
                o, logsumexp = _run_forward(forward_pass, Q, K, V, is_causal, *band)
            _save(ctx, Q, K, V, o, logsumexp, is_causal, *band)
            return o

        @staticmethod
        def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
            return _needed_gradients(name, ctx, dO, backward_op if _traced() else run_backward)

    # A tensor's grad_fn shows the name of the class.
    return type(name, (FlashAttention,), {"__doc__": f"FlashAttention-2 as an autograd.Function: `{name}`."})


def _traced() -> bool:
    """Whether torch.compile, fake tensors or the FLOP counter observe the operators that run."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _save(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor,
    is_causal: bool, window: int | None = None, starts: Tensor | None = None, ends: Tensor | None = None,
) -> None:  # fmt: skip
    ctx.save_for_backward(q, k, v, o, logsumexp, starts, ends)
    ctx.is_causal, ctx.window = is_causal, window


def _needed_gradients(name: str, ctx: Any, dO: Tensor, backward: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and of the other inputs; None where there is none or autograd does not need it."""
    if torch.is_grad_enabled() and not _traced():  # autograd would silently treat the gradients as constants
        raise RuntimeError(f"{name} has no second derivatives: its backward pass was called with create_graph=True")
    need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]  # is_causal is missing if it was not given
    *tensors, starts, ends = ctx.saved_tensors
    dq, dk, dv = backward(dO, *tensors, ctx.is_causal, need_dq, need_dk or need_dv, ctx.window, starts, ends)
    others = (None,) * (len(ctx.needs_input_grad) - 3)
    return dq if need_dq else None, dk if need_dk else None, dv if need_dv else None, *others


def _register_operators(
    name: str, forward: Forward, backward: Backward, check: Check
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    @torch.library.custom_op(f"cs336::{name}_forward", mutates_args=())
    def forward_op(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        window: int | None = None,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return _run_forward(forward, q, k, v, is_causal, window, starts, ends)

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
        window: int | None = None,
        starts: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = q, k, v, o, logsumexp
        return _run_backward(backward, dO, *saved, is_causal, need_dq, need_dkv, window, starts, ends)

    @forward_op.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *band: Any) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():  # compiling would change the error; the kernel raises it when it runs
            check(q, k, v, is_causal)
        return new_outputs(q)

    @backward_op.register_fake
    def _(dO: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        need_dq, need_dkv = rest[3:5]
        return new_gradients(q, k, v, need_dq, need_dkv)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *mask = inputs
        o, logsumexp = output
        ctx.mark_non_differentiable(logsumexp)
        _save(ctx, q, k, v, o, logsumexp, *mask)

    def op_backward(ctx: Any, dO: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        return _needed_gradients(name, ctx, dO, backward_op)

    forward_op.register_autograd(op_backward, setup_context=setup_context)
    operators = torch.ops.cs336

    @register_flop_formula(getattr(operators, f"{name}_forward"))
    def _(
        q_shape: Any, k_shape: Any, v_shape: Any, is_causal: bool, window: int | None = None, *args: Any, **kwargs: Any
    ) -> int:
        return attention_flops(q_shape, k_shape[-2], is_causal, products=2, window=window)

    @register_flop_formula(getattr(operators, f"{name}_backward"))
    def _(*shapes_and_flags: Any, **kwargs: Any) -> int:
        _, q_shape, k_shape, _, _, _, is_causal, need_dq, need_dkv, *band = shapes_and_flags
        products = 2 + need_dq + 2 * need_dkv  # the scores and dP in any case, dQ, dK and dV
        return attention_flops(q_shape, k_shape[-2], is_causal, products, band[0] if band else None)

    return forward_op, backward_op


def _run_forward(
    forward: Forward, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *band: Any
) -> tuple[Tensor, Tensor]:
    """Run a kernel's forward pass on tensors whose memory holds their values.

    A kernel that caches its launches checks its arguments only once, so here is_causal is checked in every call, and
    the tensors after an error.
    """
    check_is_causal(is_causal)
    try:
        if q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
        return forward(q, k, v, is_causal, *_given(band))
    except (AttributeError, RuntimeError):  # a check before every launch would cost a microsecond
        check_tensors(q, k, v)
        raise


def _given(band: tuple[Any, ...]) -> tuple[Band, ...]:
    """The band of a call, if it has one."""
    return () if all(part is None for part in band) else (Band(*band),)


def _run_backward(
    backward: Backward,
    dO: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    need_dq: bool,
    need_dkv: bool,
    *band: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a kernel's backward pass, after handling the cases that are the same for all kernels.

    Empty inputs are one of them. In the forward pass each kernel handles them itself, after its own checks, so that an
    empty input that it does not support raises an error too.
    """
    if dO.is_neg() or q.is_neg() or k.is_neg() or v.is_neg():  # negated lazily: memory has the other sign
        dO, q, k, v = (x.resolve_neg() for x in (dO, q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
        return dq.zero_(), dk.zero_(), dv.zero_()
    if dO.stride(-1) != 1 or 0 in dO.stride():
        dO = dO.contiguous()  # sum().backward() passes one number, expanded: slow to read, and TMA cannot move it
    logsumexp = logsumexp.contiguous()  # saved-tensor hooks may have changed it
    return backward(dO, Saved(q, k, v, o, logsumexp, is_causal, *_given(band)), need_dq, need_dkv)


def empty_outputs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor] | None:
    """o = 0 and logsumexp = -inf if there are no queries or no keys; otherwise None."""
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
    # A kernel writes through as_4d. For five dimensions it is a view only if the leading ones are stored in order.
    return torch.empty_like(x) if x.ndim <= 4 else torch.empty_like(x, memory_format=torch.contiguous_format)
