"""Linear layers with one input as one product, in compiled blocks: y = x [W1; W2; ...]^T.

q, k and v of a block read the same x, and so do w1 and w3. As one product they read it once and fill the card better.
So do their gradients, dx = dy [W1; W2; ...] and dW = dy^T x. The forward pass of a block has 4 products with weights
instead of 7, and each has two gradients.

The layers keep their parameters. `training.build.pack_matrices` puts these one behind another in memory, and FSDP
gathers them so. A view of them all is the packed weight. It is looked up before each call of a block, outside of its
compiled code, which sees a plain tensor and plain products.

Each layer has its own product where its weights lie apart (`fsdp_simple`, `torch_fsdp`, rows that FSDP pads, weights
whose bytes are no multiple of 512), where autocast would cast them, and where a layer does more than its product.
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
    """torch.cat along the last axis, as an operator whose compiled form we choose: see `_register_lowering`."""
    return torch.cat(list(parts), dim=-1)


@concatenated.register_fake
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=-1)


@functools.cache
def _register_lowering() -> None:
    """Have Inductor write each part of `concatenated` once, to its place in the result.

    Of torch.cat it makes a kernel that computes every part for every element and masks all but one.
    """
    from torch._inductor import ir, lowering  # not with the module: it takes a second

    @lowering.register_lowering(torch.ops.cs336.concatenated.default, type_promotion_kind=None)
    def lower(parts: Sequence[Any]) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(parts, len(parts[0].get_size()) - 1))


class PackedLinear:
    """The outputs of layers with one input, in place of `separately`: of one product if `find_weight` found its weight.

    names: of the layers in `module`. copies_last: the last output, v, gets memory of its own.
    Attention keeps it for the backward pass, and as a view it would keep the whole product, q and k too.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], copies_last: bool = False) -> None:
        self.module, self.names, self.copies_last = module, names, copies_last
        self.packed: Tensor | None = None

    def find_weight(self) -> None:
        """Set `packed`, if the layers do nothing but their products, and their weights lie side by side."""
        layers = [getattr(self.module, name) for name in self.names]  # one may have been replaced
        self.packed = packed_view([layer.weight for layer in layers]) if all(map(_is_plain, layers)) else None

    def __call__(self, x: Float[Tensor, "... d_in"], layers: Sequence[Linear]) -> Iterator[Tensor]:
        if self.packed is None:
            return separately(x, layers)
        weights = [layer.weight for layer in layers]
        *others, last = _PackedProduct.apply(x.to(self.packed.dtype), self.packed, *weights)
        return iter((*others, last.contiguous() if self.copies_last else last))


def use_packed(block: Any, forward: Callable[..., T]) -> Callable[..., T]:
    """Replace `project` in both halves of a TransformerBlock; return the function to call in place of `forward`.

    Attention keeps v and the rotated q and k. The product itself is kept only for norms of q and k, and then v may stay
    a view.
    """
    _register_lowering()
    attn, ffn = block.attn, block.ffn
    has_norms = not isinstance(attn.q_norm, nn.Identity)
    attn.project = PackedLinear(attn, ("q_proj", "k_proj", "v_proj"), copies_last=not has_norms)
    ffn.project = PackedLinear(ffn, ("w1", "w3"))
    return functools.partial(_call_packed, forward, (attn.project, ffn.project))


def _call_packed(forward: Callable[..., T], projections: Sequence[PackedLinear], *args: Any, **kwargs: Any) -> T:
    for projection in projections:
        projection.find_weight()
    try:
        return forward(*args, **kwargs)
    finally:
        for projection in projections:
            projection.packed = None


def _is_plain(layer: nn.Module) -> bool:
    """Whether a call of the layer is its product alone: no adapter in its place, no forward of its own, no hooks."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is Linear and "forward" not in vars(layer) and not any(hooks)


def packed_view(weights: Sequence[Tensor]) -> Tensor | None:
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
        (x, packed), weights_needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        dy = torch.ops.cs336.concatenated(gradients)
        dx = dy @ packed if ctx.needs_input_grad[0] else None
        dW: list[Tensor | None] = [None] * len(weights_needed)
        if any(weights_needed):
            parts = (dy.flatten(end_dim=-2).t() @ x).split(ctx.rows)
            dW = [part if needed else None for part, needed in zip(parts, weights_needed, strict=True)]
        return dx, None, *dW
