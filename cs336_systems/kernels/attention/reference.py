"""Attention that holds all scores: the reference for tests, and the first version of a PyTorch user.

Shapes: N_q queries, N_k keys, D head size; `...` any number of leading dimensions.
"""

import functools
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cs336_basics.attention import Documents, scaled_dot_product_attention, visible_keys, without_autocast

from .contract import FLOATING_DTYPES, band_of, check_band, check_qkv, group_size, repeat_heads


def naive(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... queries d"]:
    """`cs336_basics.attention.scaled_dot_product_attention`, the model's default, with the checks of a kernel.

    Raises ValueError if q, k and v do not match or are not floating point.
    """
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    window = check_band(q, k, is_causal, band_of(window, documents))
    return scaled_dot_product_attention(q, k, v, is_causal, window=window, documents=documents)


def attention_with_logsumexp(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> tuple[Float[Tensor, "... queries d"], Float[Tensor, "... queries"]]:
    """`naive`'s output o and the logsumexp of each query's scores, L_i = log(sum_j exp(S_ij)).

    Computes in float32, or in float64 for float64 inputs. o has q's dtype, L the dtype of the computation. Without
    keys, o = 0 and L = -inf. Source: CS336 assignment 2, equations 4 to 6 and 12.
    """
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = repeat_heads(q, k, v)
    with without_autocast(q.device.type):
        scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])
        if is_causal:
            visible = visible_keys(q.shape[-2], k.shape[-2], q.device, window, documents)
            scores = scores.masked_fill(~visible, -math.inf)
        logsumexp = scores.logsumexp(dim=-1)
        o = (scores - logsumexp[..., None]).exp() @ v.to(wide)
    return o.to(q.dtype), logsumexp


def vectorized_torch(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... queries d"]:
    """Attention as a good PyTorch user writes it: batched products in the inputs' dtype, a softmax in float32.

    In low precision the products run on tensor cores and accumulate in float32. Unlike `naive`, it rounds the scores
    when it stores them; in float16, scores beyond 65,504 overflow. The causal mask is cached between calls. The heads
    that share a key head are multiplied with it together, as the rows of one matrix.
    Raises ValueError if q, k and v do not match or are not floating point.
    """
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)
    window = check_band(q, k, is_causal, band_of(window, documents))
    with without_autocast(q.device.type):
        rows = (*k.shape[:-2], group_size(q, k) * q.shape[-2])
        scores = (q * (1 / math.sqrt(q.shape[-1]))).reshape(*rows, q.shape[-1]) @ k.mT
        scores = scores.reshape(*q.shape[:-1], k.shape[-2])
        if is_causal:
            hidden = _kept_hidden_keys(q.shape[-2], k.shape[-2], q.device, window, documents)
            scores = scores.masked_fill(hidden, -math.inf)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32))
        return (weights.to(q.dtype).reshape(*rows, k.shape[-2]) @ v).reshape(q.shape)


def _kept_hidden_keys(
    n_q: int, n_k: int, device: torch.device, window: int | None, documents: Documents | None
) -> Bool[Tensor, "... queries keys"]:
    # The compiler fuses the comparison and warns about caches. A fake mask must not be cached.
    if documents is not None or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return ~visible_keys(n_q, n_k, device, window, documents)
    return _cached_hidden_keys(n_q, n_k, device, window)


@functools.lru_cache(maxsize=2)
def _cached_hidden_keys(n_q: int, n_k: int, device: torch.device, window: int | None) -> Tensor:
    # A tensor created in inference mode could not be used in training later.
    with torch.inference_mode(False):
        return ~visible_keys(n_q, n_k, device, window)
