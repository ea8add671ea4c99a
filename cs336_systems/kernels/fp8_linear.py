"""Linear layers whose products are FP8 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

y = x W^T, dx = dy W and dW = dy^T x are FP8 products, which tensor cores compute at twice the rate of 16 bits. x and W
are rounded to E4M3 (3 bits of mantissa, up to 448), dy to E5M2 (2 bits, up to 57,344), because gradients span more
orders of magnitude. Tensor cores want the numbers of a sum side by side, so W is transposed for dx, dy and x for dW.

Each tensor has one scale, which takes its largest number to the largest of the format. It comes from the tensor itself
right before the product, so nothing is kept from step to step: checkpoints, recorded steps and other strategies need
nothing of their own. torch.compile fuses scaling and rounding with the operations around them. Weights change only
between steps: inside `weights_rounded_once` all micro-batches and recomputations share one rounding.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_basics.attention import without_autocast
from cs336_basics.model import Linear

from ..config.model import FP8_MULTIPLE

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def use_fp8(model: nn.Module) -> None:
    """Make the linear layers of a model FP8, in place. Their weights may be float32, float16 or bfloat16.

    Raises ValueError for a layer whose input or output size is not a multiple of 16.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            if any(size % FP8_MULTIPLE for size in module.weight.shape):
                raise ValueError(
                    f"{name}.weight has shape {tuple(module.weight.shape)}: with train.precision 'fp8' both sizes must "
                    f"be multiples of {FP8_MULTIPLE}"
                )
            module.__class__ = Fp8Linear
            for buffer in ("rounded", "inverse"):
                module.register_buffer(buffer, None, persistent=False)


class Fp8Linear(Linear):
    """y = W x with FP8 products. Returns 16 bits: the dtype of W, or that of autocast for a float32 W."""

    rounded: Tensor | None
    """W in FP8, inside `weights_rounded_once`."""
    inverse: Tensor | None
    """The factor that undoes its scaling."""

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        dtype = self.weight.dtype
        if dtype == torch.float32:
            dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), self.weight.to(dtype)
        with without_autocast(x.device.type):
            return _Fp8Product.apply(x, weight, self.rounded, self.inverse)


@contextlib.contextmanager
def weights_rounded_once(
    layers: Sequence[Fp8Linear], dtype: torch.dtype, quantize: Callable[..., Any]
) -> Iterator[None]:
    """Round the weights of the layers to FP8, and share that among all products inside.

    It takes a byte for each weight. The weights must be whole, and must not change inside. A recorded step holds the
    rounding too. dtype: the 16-bit dtype of x and W in the products. quantize: `quantized`, or its compiled form.
    """
    with torch.no_grad():
        for layer in layers:
            layer.rounded, layer.inverse = quantize(layer.weight.to(dtype), FORWARD)
    try:
        yield
    finally:
        for layer in layers:
            layer.rounded = layer.inverse = None


def quantized(x: Tensor, dtype: torch.dtype, inverse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x in an FP8 dtype, scaled so that its largest number is the format's, and the factor () that undoes the scaling.

    inverse: that factor, if it is known. If x has NaN or infinity, the factor and so the product are not finite.
    """
    largest = torch.finfo(dtype).max
    if inverse is None:
        inverse = x.abs().amax().to(torch.float32).clamp(min=math.ldexp(1, -100)) / largest
    return (x.to(torch.float32) / inverse).clamp(-largest, largest).to(dtype), inverse


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """a b^T for `quantized` a (M, K) and b (N, K), in a 16-bit dtype. Sums are float32, for E4M3 rougher ones."""
    (a8, a_inverse), (b8, b_inverse) = a, b
    columns = b8.contiguous().t()
    return torch._scaled_mm(
        a8.contiguous(), columns, a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=a8.dtype == FORWARD
    )


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounded: Tensor | None, inverse: Tensor | None) -> Tensor:
        w8 = quantized(weight, FORWARD) if rounded is None or inverse is None else (rounded, inverse)
        x8 = quantized(x.reshape(-1, x.shape[-1]), FORWARD)
        ctx.save_for_backward(x, weight, rounded, inverse, x8[1])
        return product(x8, w8, x.dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, rounded, inverse, x_inverse) = gradients, ctx.saved_tensors
        dx = dW = None
        rows, dy_rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, dy))
        dy8, dy_inverse = quantized(dy_rows, BACKWARD)
        if ctx.needs_input_grad[0]:
            w8, inverse = quantized(weight, FORWARD) if rounded is None else (rounded, inverse)
            dx = product((dy8, dy_inverse), (w8.t(), inverse), dy.dtype).view(x.shape)
        if ctx.needs_input_grad[1] and len(rows) % FP8_MULTIPLE:
            dW = dy_rows.t() @ rows
        elif ctx.needs_input_grad[1]:
            x8, _ = quantized(rows, FORWARD, x_inverse)
            dW = product((dy8.t(), dy_inverse), (x8.t(), x_inverse), dy.dtype)
        return dx, dW, None, None
