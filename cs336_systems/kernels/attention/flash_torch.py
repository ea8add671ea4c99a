"""FlashAttention-2 (Dao 2023) in plain PyTorch: the algorithm to read, and attention in O(N D) memory on any device.

Legend
    B              all leading dimensions of k flattened into one
    N_q, N_k, D    queries, keys, head size
    group          how many query heads share a key head. Their queries are the rows of one matrix, of (B, rows, D):
                   row i * group + g is query i of the g-th head
    S              the scores, Q K^T / sqrt(D)
    L              the logsumexp of each query's scores
    P              the softmax, exp(S - L)
    delta          delta_i = sum_d dO_id O_id
    tile           a square of S: queries i to i + size, keys j to j + size
    first          the first key that a query sees, where a window or documents limit it, of (B or 1, N)
    maximum, denominator, p    in the forward pass: the paper's m, its l, and exp(S - m)

Everything inside is float32, or float64 for float64 inputs.
"""

import functools
import logging
import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cs336_basics.attention import Documents, without_autocast

from .contract import FLOATING_DTYPES, Band, band_of, check_qkv, group_size
from .function import Saved, flash_function, new_gradients, new_outputs

logger = logging.getLogger(__name__)

# Scores per tile, over all of B. On a CPU a tile stays in a core's cache. On a GPU it has 64 MiB, so that work on it
# takes longer than its launch; a backward pass holds three such tiles.
_TILE_SCORES = {"cpu": 2**18, "cuda": 2**24}
# From this many scores on, tiles are compiled. Smaller ones finish before a compiled function has checked its guards.
# Nothing is compiled on a CPU, where compiling takes up to a minute and few tiles get faster.
_WORTH_COMPILING = {"cuda": 2**16}
# Each kind of tile is compiled separately: on the diagonal, square, with one head, with sizes that are equal, ...
_RECOMPILE_LIMIT = 64


def tile_size(batch: int, device_type: str) -> int:
    """Queries and keys per tile: 2^n with batch (q's heads in all) x size x size within `_TILE_SCORES`, at least 16."""
    scores = _TILE_SCORES.get(device_type, _TILE_SCORES["cpu"]) // max(batch, 1)
    return max(16, 2 ** (int(math.log2(max(scores, 1))) // 2))


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    check_qkv(q, k, v, is_causal, dtypes=FLOATING_DTYPES)


class _Mask:
    """Which keys the queries of a tile see. Queries i to i + size and keys j to j + size are a tile."""

    def __init__(self, size: int, q: Tensor, k: Tensor, is_causal: bool, band: Band | None) -> None:
        self.size, self.group, self.is_causal = size, group_size(q, k), is_causal
        self._n_q, self._n_k, self._device = q.shape[-2], k.shape[-2], q.device
        self._first = None if band is None or q.numel() == 0 else _first_keys(band, k)
        if self._first is not None:  # it grows with the query: a tile's extremes are those of its first and last query
            last_queries = [min(i + size, self._n_q) - 1 for i in range(0, self._n_q, size)]
            self._lowest = self._first[:, ::size].amin(0).tolist()
            self._highest = self._first[:, last_queries].amax(0).tolist()

    def hides_all(self, i: int, j: int) -> bool:
        """Whether no query of a tile sees any of its keys."""
        is_before = self._first is not None and j + self.size <= self._lowest[i // self.size]
        return is_before or (self.is_causal and j > i)

    def hidden(self, i: int, j: int) -> Bool[Tensor, "B_or_1 rows keys"] | None:
        """Where the scores of a tile are hidden; None if nowhere. Row r is query i + r // group."""
        is_limited = self._first is not None and j < self._highest[i // self.size]
        if not is_limited and not (self.is_causal and i == j):
            return None
        queries = torch.arange(i, min(i + self.size, self._n_q), device=self._device)[:, None]
        keys = torch.arange(j, min(j + self.size, self._n_k), device=self._device)
        hidden = (keys > queries)[None]
        if self._first is not None:
            hidden = hidden | (keys < self._first[:, i : i + self.size, None])
        return hidden.repeat_interleave(self.group, dim=1)


def _first_keys(band: Band, k: Float[Tensor, "... N D"]) -> Int[Tensor, "B_or_1 N"]:
    """The first key that each query sees, at most its own."""
    n = k.shape[-2]
    first = torch.arange(n, device=k.device)[None] - (band.window or n) + 1
    if band.starts is None:
        return first
    of_heads = band.starts if k.ndim == 2 else band.starts[..., None, :].expand(k.shape[:-1])
    return torch.maximum(first, of_heads.reshape(-1, n))


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, band: Band | None = None) -> tuple[Tensor, Tensor]:
    """Algorithm 1 on float32 copies; the results have the dtypes and layouts that the operator promises."""
    _check(q, k, v, is_causal)
    o, logsumexp = new_outputs(q)
    group = group_size(q, k)
    with without_autocast(q.device.type):
        mask = _Mask(tile_size(q.shape[:-2].numel(), q.device.type), q, k, is_causal, band)
        wide_o, wide_logsumexp = _forward_tiles(_as_rows(q, group), _as_wide_3d(k), _as_wide_3d(v), mask)
        _copy_rows(o, wide_o, group)
        _copy_rows(logsumexp[..., None], wide_logsumexp[..., None], group)
        return o, logsumexp


def _forward_tiles(
    q: Float[Tensor, "B rows D"], k: Float[Tensor, "B N_k D"], v: Float[Tensor, "B N_k D"], mask: _Mask
) -> tuple[Float[Tensor, "B rows D"], Float[Tensor, "B rows"]]:
    """Compute the softmax of a row tile by tile, with a running maximum and a running denominator.

    When the maximum grows, the denominator and the output so far are multiplied by exp(old maximum - new maximum).
    """
    (batch, rows, _), n_k = q.shape, k.shape[1]
    group, size = mask.group, mask.size
    o, logsumexp = torch.zeros_like(q), q.new_full((batch, rows), -math.inf)
    if n_k == 0:  # no keys: the output is 0, the logsumexp log(0)
        return o, logsumexp
    q = q / math.sqrt(q.shape[-1])
    for i in range(0, rows // group, size):
        tile = slice(i * group, (i + size) * group)
        q_i = q[:, tile]
        o_i = torch.zeros_like(q_i)
        maximum = q.new_full((batch, q_i.shape[1], 1), -math.inf)
        denominator = torch.zeros_like(maximum)
        for j in range(0, n_k, size):
            if mask.hides_all(i, j):
                continue
            scores = q_i @ k[:, j : j + size].mT
            if (hidden := mask.hidden(i, j)) is not None:
                scores.masked_fill_(hidden, -math.inf)
            new_maximum = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
            shift = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)  # -inf - -inf is NaN
            p = scores.sub_(shift).exp_()
            rescale = (maximum - shift).exp_()
            denominator = denominator * rescale + p.sum(dim=-1, keepdim=True)
            o_i = torch.baddbmm(o_i.mul_(rescale), p, v[:, j : j + size])
            maximum = new_maximum
        o[:, tile] = o_i / denominator
        logsumexp[:, tile] = (maximum + denominator.log()).squeeze(-1)
    return o, logsumexp


def _backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    size = tile_size(dO.shape[:-2].numel(), dO.device.type)
    return _gradients_by_tiles(size, dO, saved, need_dq, need_dkv)


def compiled_backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass as the handout first asks for it: one compiled function over all of S, for any forward pass.

    A `function.Backward`. Holds N_q x N_k scores. On a GPU it is compiled on first use, which takes seconds, once for
    each kind of tile (`_RECOMPILE_LIMIT`) and not for each size. It runs eagerly on small problems and, after a
    warning, without a compiler. Source: CS336 assignment 2, equations 13 to 19.
    """
    size = max(saved.q.shape[-2], saved.k.shape[-2], 1)
    return _gradients_by_tiles(size, dO, saved, need_dq, need_dkv)


def _gradients_by_tiles(
    size: int, dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute every tile of S and P and add its part to dQ, dK and dV, whether they are needed or not."""
    q, k, v, o, logsumexp, is_causal, band = saved
    group = group_size(q, k)
    with torch.no_grad(), without_autocast(q.device.type):
        wide_q, wide_dO, wide_o = (_as_rows(x, group) for x in (q, dO, o))
        wide_k, wide_v = _as_wide_3d(k), _as_wide_3d(v)
        wide_q = wide_q / math.sqrt(q.shape[-1])
        logsumexp = _as_rows(logsumexp[..., None], group).squeeze(-1)
        delta = (wide_dO * wide_o).sum(dim=-1)
        dQ, dK, dV = (torch.zeros_like(x) for x in (wide_q, wide_k, wide_v))
        mask = _Mask(size, q, k, is_causal, band)
        for j in range(0, k.shape[-2], size):
            keys = slice(j, j + size)
            k_j, v_j, dK_j, dV_j = (x[:, keys] for x in (wide_k, wide_v, dK, dV))
            for i in range(0, q.shape[-2], size):
                if mask.hides_all(i, j):
                    continue
                rows = slice(i * group, (i + size) * group)
                per_query = (x[:, rows] for x in (wide_dO, wide_q, logsumexp, delta))
                dQ_tile, dK_tile, dV_tile = _tile_gradients(k_j, v_j, *per_query, mask.hidden(i, j))
                dQ[:, rows].add_(dQ_tile)
                dK_j.add_(dK_tile)
                dV_j.add_(dV_tile)
        dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
        if need_dq:
            _copy_rows(dq, dQ, group)
        if need_dkv:
            dk.copy_(dK.view(k.shape))
            dv.copy_(dV.view(v.shape))
        return dq, dk, dv


def _gradients(
    k: Float[Tensor, "B keys D"],
    v: Float[Tensor, "B keys D"],
    dO: Float[Tensor, "B rows D"],
    q: Float[Tensor, "B rows D"],
    logsumexp: Float[Tensor, "B rows"],
    delta: Float[Tensor, "B rows"],
    hidden: Bool[Tensor, "B_or_1 rows keys"] | None,
) -> tuple[Float[Tensor, "B rows D"], Float[Tensor, "B keys D"], Float[Tensor, "B keys D"]]:
    """The parts of dQ, dK and dV that come from one tile, by equations 13 to 19.

    q is already divided by sqrt(D), which saves a pass over S. dK then includes this factor; dQ still needs it.
    """
    p = (q @ k.mT - logsumexp[..., None]).exp()
    if hidden is not None:
        p = p.masked_fill(hidden, 0.0)
    dV = p.mT @ dO
    dS = p * (dO @ v.mT - delta[..., None])
    return dS @ k / math.sqrt(q.shape[-1]), dS.mT @ q, dV


@functools.cache
def _compiled_gradients() -> Any:
    return torch.compile(_gradients, dynamic=True)


_no_compiler_for: set[str] = set()


def _tile_gradients(k: Tensor, v: Tensor, dO: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`_gradients`, compiled if possible and worth it."""
    device_type = k.device.type
    scores = k.shape[0] * k.shape[1] * dO.shape[1]
    if scores < _WORTH_COMPILING.get(device_type, math.inf) or device_type in _no_compiler_for:
        return _gradients(k, v, dO, *others)
    try:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):  # PyTorch's default is 8
            return _compiled_gradients()(k, v, dO, *others)
    except torch._dynamo.exc.TorchDynamoException as error:
        _no_compiler_for.add(device_type)
        reason = str(error).strip().splitlines()[0]
        logger.warning("the backward pass of attention runs without torch.compile on %s: %s", device_type, reason)
        return _gradients(k, v, dO, *others)


def _as_rows(x: Float[Tensor, "... N D"], group: int) -> Float[Tensor, "B rows D"]:
    return _as_wide_3d(_heads_in_rows(x, group).flatten(-3, -2))


def _copy_rows(x: Float[Tensor, "... N D"], rows: Float[Tensor, "B rows D"], group: int) -> None:
    """Copy into x what `_as_rows` would give for it."""
    x = _heads_in_rows(x, group)
    x.copy_(rows.view(x.shape))


def _heads_in_rows(x: Float[Tensor, "... N D"], group: int) -> Float[Tensor, "... N G D"]:
    """A view of x with the heads of a group inside of the positions."""
    if x.ndim == 2:
        return x[:, None]
    return x.unflatten(-3, (x.shape[-3] // group, group)).transpose(-3, -2)


def _as_wide_3d(x: Float[Tensor, "... N D"]) -> Float[Tensor, "B N D"]:
    # Detached: a compiled function would be recompiled for every set of inputs that require gradients.
    x = x.detach().reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


FlashAttentionTorch = flash_function("flash_torch", _forward, _backward, _check)


def flash_torch(
    q: Float[Tensor, "... queries d"],
    k: Float[Tensor, "... keys d"],
    v: Float[Tensor, "... keys d"],
    is_causal: bool = False,
    *,
    window: int | None = None,
    documents: Documents | None = None,
) -> Float[Tensor, "... queries d"]:
    """FlashAttention-2 in plain PyTorch, on any device, in O(N D) memory forward and backward; float32 inside.

    On a GPU, torch.compile compiles the backward pass of a tile on first use, which takes seconds. On a CPU, and
    without a compiler, it runs eagerly. With a window or documents the host waits for the GPU, to know which tiles to
    skip.
    Raises ValueError naming the argument if q, k and v do not match or are not floating point.
    Source: Dao 2023, FlashAttention-2, algorithm 1; the backward pass is CS336 assignment 2, equations 13 to 19.
    """
    return FlashAttentionTorch.call(q, k, v, is_causal, band_of(window, documents))
