"""Linear layers whose products are FP8 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

y = x W^T and dx = dy W are FP8 products, which tensor cores compute at twice the rate of 16 bits. dW = dy^T x stays
16-bit: it is the sum over all tokens, and FP8 would need transposed copies of x and dy. x and W are rounded to E4M3
(3 bits of mantissa, up to 448), dy to E5M2 (2 bits, up to 57,344), because gradients span more orders of magnitude.

Each tensor has one scale, which takes its largest number to the largest of the format. It comes from the tensor itself
right before the product, so nothing is kept from step to step: checkpoints, recorded steps and other strategies need
nothing of their own. torch.compile fuses scaling and rounding with the operations around them.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cs336_basics.attention import without_autocast
from cs336_basics.model import Linear

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Input and output sizes of an FP8 product are multiples of 16."""


def use_fp8(model: nn.Module) -> None:
    """Make the linear layers of a model FP8, in place. Their weights may be float32, float16 or bfloat16.

    Raises ValueError for a layer whose input or output size is not a multiple of 16.
    """
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            if any(size % MULTIPLE for size in module.weight.shape):
                raise ValueError(
                    f"{name}.weight has shape {tuple(module.weight.shape)}: with train.precision 'fp8' both sizes must "
                    f"be multiples of {MULTIPLE}"
                )
            module.__class__ = Fp8Linear


class Fp8Linear(Linear):
    """y = W x with FP8 products. Returns 16 bits: the dtype of W, or that of autocast for a float32 W."""

    def forward(self, x: Float[Tensor, "... d_in"]) -> Float[Tensor, "... d_out"]:
        dtype = self.weight.dtype
        if dtype == torch.float32:
            dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), self.weight.to(dtype)
        with without_autocast(x.device.type):
            return _Fp8Product.apply(x, weight)


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in an FP8 dtype, scaled so that its largest number is the format's, and the factor () that undoes the scaling.

    A number that is not finite makes the factor so too, and with it the product.
    """
    largest = torch.finfo(dtype).max
    inverse = x.abs().amax().to(torch.float32).clamp(min=math.ldexp(1, -100)) / largest
    return (x.to(torch.float32) / inverse).clamp(-largest, largest).to(dtype), inverse


def product(a: Tensor, b: Tensor, a_dtype: torch.dtype, b_dtype: torch.dtype) -> Tensor:
    """a b^T for a (M, K) and b (N, K), rounded to FP8 first; sums in float32; in the dtype of a."""
    (a8, a_inverse), (b8, b_inverse) = quantized(a, a_dtype), quantized(b.contiguous(), b_dtype)
    return torch._scaled_mm(a8, b8.t(), a_inverse, b_inverse, out_dtype=a.dtype, use_fast_accum=a_dtype == FORWARD)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        return product(rows, weight, FORWARD, FORWARD).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (dy,), (x, weight) = gradients, ctx.saved_tensors
        dx = dW = None
        dy_rows = dy.reshape(-1, dy.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = product(dy_rows, weight.t(), BACKWARD, FORWARD).view(x.shape)
        if ctx.needs_input_grad[1]:
            dW = dy_rows.t() @ x.reshape(-1, x.shape[-1])
        return dx, dW
