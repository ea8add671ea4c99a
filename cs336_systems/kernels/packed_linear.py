"""Linear layers with one input as one product, in compiled blocks: y = x [W1; W2; ...]^T.

q, k and v of a block read the same x, and so do w1 and w3. As one product they read it once and fill the card better.
So do their gradients, dx = dy [W1; W2; ...] and dW = dy^T x. A block has 12 products with weights in a step, not 21.

The layers keep their parameters. If these lie one behind another in memory, a view of them all is the packed weight.
Where they lie is looked up before each call of a block, outside of its compiled code, which sees a plain tensor and
plain products. So it does not matter who has moved them (`training.build.pack_matrices`, or FSDP's gather). Weights
that lie apart, or that autocast would cast one by one, have a product each.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_basics.model import Linear, separately

T = TypeVar("T")


@torch.library.custom_op("cs336::concatenated", mutates_args=())
def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """torch.cat along the last axis, for compiled code: see `_write_parts_in_place`."""
    return torch.cat(list(parts), dim=-1)


@concatenated.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=-1)


@functools.cache
def _write_parts_in_place() -> None:
    """Have the compiler write each part of `concatenated` where it belongs in the result.

    It makes another kernel of torch.cat on a GPU, which computes all parts for each element, and takes one.
    """
    from torch._inductor import ir, lowering  # not with the module: it takes a second

    @lowering.register_lowering(torch.ops.cs336.concatenated.default, type_promotion_kind=None)
    def lower(parts: Sequence[Any]) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(parts, len(parts[0].get_size()) - 1))


class PackedLinear:
    """The outputs of sibling layers, in place of `separately`: views of one product, while it has the packed weight.

    copies_last: the last output gets memory of its own, because it is kept for the backward pass when the others, and
    with them the product, are not.
    """

    def __init__(self, layers: Sequence[Linear], copies_last: bool = False) -> None:
        self.layers, self.copies_last = layers, copies_last
        self.packed: Tensor | None = None

    def __call__(self, x: Float[Tensor, "... d_in"], layers: Sequence[Linear]) -> Iterator[Tensor]:
        if self.packed is None:
            return separately(x, layers)
        weights = [layer.weight for layer in layers]
        *others, last = _PackedProduct.apply(x.to(self.packed.dtype), self.packed, *weights)
        return iter((*others, last.contiguous() if self.copies_last else last))


def use_packed(block: Any, forward: Callable[..., T]) -> Callable[..., T]:
    """Make sibling layers of a TransformerBlock one product, in calls of the function that is returned for `forward`.

    Attention keeps v, and q and k after their rotation. Before it they are kept only for norms of them.
    """
    _write_parts_in_place()
    attn, ffn = block.attn, block.ffn
    has_norms = not isinstance(attn.q_norm, nn.Identity)
    attn.project = PackedLinear((attn.q_proj, attn.k_proj, attn.v_proj), copies_last=not has_norms)
    ffn.project = PackedLinear((ffn.w1, ffn.w3))
    return functools.partial(_call_packed, forward, (attn.project, ffn.project))


def _call_packed(forward: Callable[..., T], projections: Sequence[PackedLinear], *args: Any, **kwargs: Any) -> T:
    for projection in projections:
        projection.packed = side_by_side([layer.weight for layer in projection.layers])
    try:
        return forward(*args, **kwargs)
    finally:
        for projection in projections:
            projection.packed = None


def side_by_side(weights: Sequence[Tensor]) -> Tensor | None:
    """The weights (rows, d_in) as one tensor, a view, if they lie so in memory and are not cast by autocast."""
    first = weights[0]
    if first.dtype == torch.float32 and torch.is_autocast_enabled(first.device.type):
        return None
    storage, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for weight in weights:
        is_next = weight.data_ptr() == address and weight.untyped_storage().data_ptr() == storage
        if (
            not is_next
            or weight.dtype != first.dtype
            or weight.shape[1] != first.shape[1]
            or not weight.is_contiguous()
        ):
            return None
        address += weight.nbytes
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1))


class _PackedProduct(torch.autograd.Function):
    """The outputs are views of one product, and so are the gradients of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x.flatten(end_dim=-2), packed)
        ctx.rows = [len(weight) for weight in weights]
        return nn.functional.linear(x, packed).split(ctx.rows, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, packed), needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        dy = torch.ops.cs336.concatenated(gradients)
        dx = dy @ packed if ctx.needs_input_grad[0] else None
        dW: list[Tensor | None] = [None] * len(needed)
        if any(needed):
            product = dy.flatten(end_dim=-2).t() @ x
            dW = [part if is_needed else None for part, is_needed in zip(product.split(ctx.rows), needed, strict=True)]
        return dx, None, *dW
