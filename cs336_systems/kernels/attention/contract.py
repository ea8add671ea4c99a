"""Shared by all attention kernels: checks of arguments, grouped heads, the (B, H, N, D) view, the count of operations.

Shapes: B batch, H heads, N_q queries, N_k keys, D head size. See `docs/design.md`, Contracts, Attention.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cs336_basics.attention import Documents

FLOATING_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Band(NamedTuple):
    """A limit on how far back a query sees: a window, documents, or both. N queries and N keys.

    Query i sees the keys from max(starts[i], i - window + 1) to i. Both ends of the range grow with i, so a key is seen
    by a range of queries too: key j by the queries from j to min(ends[j], j + window) - 1.
    """

    window: int | None = None
    starts: Int[Tensor, "... N"] | None = None
    ends: Int[Tensor, "... N"] | None = None


def band_of(window: int | None, documents: Documents | None) -> Band | None:
    """A call's band; None if it has neither a window nor documents. Raises ValueError for documents in another form."""
    if documents is None:
        return None if window is None else Band(window)
    if not isinstance(documents, Documents):
        made_by = "Documents, which Documents.from_numbers and from_tokens make"
        raise ValueError(f"documents is a {type(documents).__name__}: it must be {made_by}")
    return Band(window, *documents)


def check_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    max_head_size: int | None = None,
    equal_heads: str | None = None,
) -> None:
    """Raise a ValueError with the argument that breaks the contract, its value and the accepted values.

    q must be (..., N_q, D), k and v (..., N_k, D), all of one dtype, on one device, with the same leading dimensions.
    The last of these, the heads, may be fewer in k and v if their number divides that of q. `dtypes`, `max_head_size`
    and `equal_heads`, the name of a kernel that needs as many heads in all three, are a kernel's own limits.
    """
    check_is_causal(is_causal)
    check_tensors(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim < 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be (..., length, head size)")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}: it must be of q's dtype, which is {q.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}: it must be on q's device, which is {q.device}")
        if tensor.ndim != q.ndim or tensor.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: its leading dimensions must be those of q, "
                f"which are {tuple(q.shape[:-2])}, or have fewer heads, the last of them"
            )
        if tensor.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: its head size must be that of q, which is {q.shape[-1]}"
            )
    if q.ndim > 2:
        _check_heads(q.shape[-3], k.shape[-3], v.shape[-3], equal_heads)
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v has {v.shape[-2]} positions: it must have as many as k, which has {k.shape[-2]}")
    if dtypes is not None and q.dtype not in dtypes:
        raise ValueError(f"q is {q.dtype}: it must be one of {', '.join(map(str, dtypes))}")
    largest = max_head_size or q.shape[-1]
    if not 1 <= q.shape[-1] <= largest:
        accepted = "at least 1" if max_head_size is None else f"1 to {max_head_size}"
        raise ValueError(f"q has head size {q.shape[-1]}: it must be {accepted}")


def _check_heads(of_q: int, of_k: int, of_v: int, equal_heads: str | None) -> None:
    if of_k != of_q and (not 1 <= of_k <= of_q or of_q % of_k):
        raise ValueError(f"k has {of_k} heads: they must divide q's, which has {of_q}")
    if of_v != of_k:
        raise ValueError(f"v has {of_v} heads: it must have as many as k, which has {of_k}")
    if equal_heads is not None and of_k != of_q:
        raise ValueError(f"k has {of_k} heads: {equal_heads} needs as many as q has, which are {of_q}")


def check_band(q: Tensor, k: Tensor, is_causal: bool, band: Band | None) -> int | None:
    """The band's window, or None if it hides no key, because it is at least as long as the sequence.

    Raises a ValueError with the argument, its value and the accepted values, if a window or documents do not fit.
    """
    if band is None:
        return None
    if not is_causal or q.shape[-2] != k.shape[-2]:
        given = f"is_causal is {is_causal} with {q.shape[-2]} queries and {k.shape[-2]} keys"
        raise ValueError(f"{given}: a window and documents need True and as many of both")
    if band.window is not None and (type(band.window) is not int or band.window < 1):
        raise ValueError(f"window is {band.window!r}: it must be a whole number of keys, at least 1")
    for name, x in (("starts", band.starts), ("ends", band.ends)):
        expected = (*q.shape[:-3], q.shape[-2])
        if x is not None and (x.shape != expected or x.dtype != torch.int32 or x.device != q.device):
            raise ValueError(
                f"documents.{name} is {tuple(x.shape)}, {x.dtype}, on {x.device}: "
                f"it must be {expected}, torch.int32, on q's device, which is {q.device}"
            )
    return None if band.window is None or band.window >= k.shape[-2] else band.window


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a ValueError naming the argument that is not a dense tensor."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: it must be a tensor")
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.layout is torch.strided else tensor.layout
            raise ValueError(f"{name} is {layout}: it must be dense")


def check_is_causal(is_causal: bool) -> None:
    """Raise a ValueError if it is not a bool: a string or a mask would count as true."""
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal is {' '.join(repr(is_causal).split()):.60}: it must be True or False")


def group_size(q: Tensor, k: Tensor) -> int:
    """G: each head of k serves so many neighbouring heads of q. 1 for tensors without heads."""
    return q.shape[-3] // k.shape[-3] if q.ndim > 2 and k.shape[-3] else 1


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q: a copy of each head for each head of q that it serves."""
    if (group := group_size(q, k)) == 1:
        return k, v
    return k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)


def as_4d(x: Float[Tensor, "... N D"]) -> Float[Tensor, "B H N D"]:
    """x with two leading dimensions: a view if x has up to four dimensions, or if its strides allow flattening."""
    if x.ndim == 4:
        return x
    if x.ndim > 4:
        return x.flatten(0, -4)
    return x[(None,) * (4 - x.ndim)]


def can_use_tma(*tensors: Tensor) -> bool:
    """Whether TMA can move these tensors: rows are contiguous and 16-byte aligned, and none is repeated."""
    for x in tensors:
        *steps, last = x.stride()
        if last != 1 or x.data_ptr() % 16:
            return False
        unit = 16 // x.element_size()
        for step, size in zip(steps, x.shape, strict=False):
            if size > 1 and (step <= 0 or step % unit):
                return False
    return True


def heads_in_cache(tiled: Tensor, looped_over: Tensor, cache_bytes: int) -> int:
    """How many heads of `tiled` have tensors of the inner loop that fit in so much of the L2 cache.

    tiled: the tensor whose tiles the programs have. looped_over: one of the two tensors of the inner loop. Both are
    (B, H, N, D).
    """
    head_bytes = 2 * looped_over.shape[2] * looped_over.shape[3] * looped_over.element_size()
    return cache_bytes // head_bytes * tiled.shape[1] // looped_over.shape[1]


def heads_on_hopper(in_cache: int, is_causal: bool) -> int:
    """How many heads Hopper's kernels compute at a time, if so many fit in their part of the cache.

    Causal tiles differ in length, and with 4,096 tokens fewer heads than four are slower. Other tiles have one length,
    so programs that share a head begin together and read the same rows at the same time.
    """
    return max(4, in_cache) if is_causal else 1


def visible_pairs(n_q: int, n_k: int, is_causal: bool, window: int | None = None) -> int:
    """The number of (query, key) pairs the mask leaves: N_q N_k, or the sum of min(i + 1, N_k) over queries i < N_q.

    With a window, which needs N_q = N_k, the sum of min(i + 1, window).
    """
    if not is_causal:
        return n_q * n_k
    most = n_k if window is None else min(n_k, window)
    triangle = min(n_q, most)
    return triangle * (triangle + 1) // 2 + (n_q - triangle) * most


def attention_flops(
    q_shape: Sequence[int], n_k: int, is_causal: bool, products: int = 2, window: int | None = None
) -> int:
    """Operations of `products` matrix products over the visible pairs: 2 D per pair and product.

    The forward pass has 2 products (scores, values), the backward pass 5 (scores, dV, dP, dQ, dK). A kernel's further
    recomputation is not useful work and is not counted. Documents count as one: their lengths are on the device.
    """
    *leading, n_q, d = q_shape
    return products * 2 * d * visible_pairs(n_q, n_k, is_causal, window) * torch.Size(leading).numel()
