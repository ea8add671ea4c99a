"""FlashAttention-2 in Triton, to be read beside the paper (Dao 2023, FlashAttention-2, Algorithms 1 and 2).

Three kernels: one for the forward pass, one for dQ, one for dK and dV. Algorithm 2 adds to dQ in memory for each tile
of keys, which needs atomic additions if many programs run at once. Here a second kernel computes P again for dQ, and
each output is written once. `flash_triton.py` is the fast version: its tile sizes are measured, it masks only the
tiles that need it, and on Hopper it uses TMA and kernels written in Gluon.

Legend
    Q, K, V, O    pointers to (B, H, N, D) tensors with any strides; dO, dQ, dK, dV are their gradients
    L, DELTA      (B, H, N_q) float32: the logsumexp of each query's scores, and the paper's D = rowsum(dO * O)
    q, k, v, ...  tiles of TILE rows and D_PAD columns; D_PAD is the head size D rounded up to a power of two
    m, total      the paper's m and l: each query's largest score so far, and its sum of exponentials
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from ...machine.hardware import allows_tf32
from ..launch import INTERPRET, check_device
from .contract import as_4d, check_qkv
from .function import Saved, empty_outputs, flash_function, new_gradients, new_outputs

_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def _pointers(x, strides, bh, H, rows, N, D: tl.constexpr, D_PAD: tl.constexpr):
    """Pointers to the given rows of head bh, and a mask of the elements that exist."""
    columns = tl.arange(0, D_PAD).to(tl.int64)  # 64-bit, because an index times a stride may not fit in 32 bits
    start = x + bh // H * strides[0] + bh % H * strides[1]
    pointers = start + rows.to(tl.int64)[:, None] * strides[2] + columns * strides[3]
    return pointers, (rows < N)[:, None] & (columns < D)


@triton.jit
def _load(x, strides, bh, H, rows, N, D: tl.constexpr, D_PAD: tl.constexpr):
    pointers, mask = _pointers(x, strides, bh, H, rows, N, D, D_PAD)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store(x, strides, tile, bh, H, rows, N, D: tl.constexpr, D_PAD: tl.constexpr):
    pointers, mask = _pointers(x, strides, bh, H, rows, N, D, D_PAD)
    tl.store(pointers, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if _INTERPRET:  # the interpreter multiplies the bits of bfloat16 as if they were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _scores(q, k, rows, keys, scale, N_k, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """S = q k^T / sqrt(D), and -inf where a query does not see a key."""
    visible = (keys < N_k)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= keys[None, :])
    return tl.where(visible, _dot(q, k.T, PRECISION) * scale, float("-inf"))


@triton.jit
def _forward_kernel(
    Q, K, V, O, L, q_strides, k_strides, v_strides, o_strides, H, N_q, N_k, scale,  # noqa: E741
    TILE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 1: one tile of queries, a loop over the keys."""
    bh, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = i * TILE + tl.arange(0, TILE)
    q = _load(Q, q_strides, bh, H, rows, N_q, D, D_PAD)  # line 4
    o = tl.zeros([TILE, D_PAD], tl.float32)  # line 5
    total, m = tl.zeros([TILE], tl.float32), tl.full([TILE], float("-inf"), tl.float32)
    end = tl.minimum((i + 1) * TILE, N_k) if CAUSAL else N_k  # no query of this tile sees later keys
    for start in tl.range(0, end, TILE):  # line 6
        keys = start + tl.arange(0, TILE)
        k = _load(K, k_strides, bh, H, keys, N_k, D, D_PAD)  # line 7
        v = _load(V, v_strides, bh, H, keys, N_k, D, D_PAD)
        s = _scores(q, k, rows, keys, scale, N_k, CAUSAL, PRECISION)  # line 8
        m_new = tl.maximum(m, tl.max(s, 1))  # line 9
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no score so far is above -inf; -inf - -inf is NaN
        p = tl.exp(s - shift[:, None])
        alpha = tl.exp(m - shift)
        total = alpha * total + tl.sum(p, 1)
        o = alpha[:, None] * o + _dot(p.to(v.dtype), v, PRECISION)  # line 10
        m = m_new
    _store(O, o_strides, o / total[:, None], bh, H, rows, N_q, D, D_PAD)  # lines 12 and 14
    tl.store(L + bh * N_q + rows, m + tl.log(total), mask=rows < N_q)  # lines 13 and 15


@triton.jit
def _dq_kernel(
    Q, K, V, dO, dQ, L, DELTA, q_strides, k_strides, v_strides, do_strides, dq_strides, H, N_q, N_k, scale,
    TILE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 2 for dQ: one tile of queries, a loop over the keys."""
    bh, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows = i * TILE + tl.arange(0, TILE)
    q = _load(Q, q_strides, bh, H, rows, N_q, D, D_PAD)
    do = _load(dO, do_strides, bh, H, rows, N_q, D, D_PAD)
    lse = tl.load(L + bh * N_q + rows, mask=rows < N_q, other=0.0)
    delta = tl.load(DELTA + bh * N_q + rows, mask=rows < N_q, other=0.0)
    dq = tl.zeros([TILE, D_PAD], tl.float32)  # line 3
    end = tl.minimum((i + 1) * TILE, N_k) if CAUSAL else N_k
    for start in tl.range(0, end, TILE):
        keys = start + tl.arange(0, TILE)
        k = _load(K, k_strides, bh, H, keys, N_k, D, D_PAD)
        v = _load(V, v_strides, bh, H, keys, N_k, D, D_PAD)
        p = tl.exp(_scores(q, k, rows, keys, scale, N_k, CAUSAL, PRECISION) - lse[:, None])  # lines 10 and 11
        ds = p * (_dot(do, v.T, PRECISION) - delta[:, None])  # lines 13 and 14
        dq += _dot(ds.to(k.dtype), k, PRECISION)  # line 15
    _store(dQ, dq_strides, dq * scale, bh, H, rows, N_q, D, D_PAD)


@triton.jit
def _dkv_kernel(
    Q, K, V, dO, dK, dV, L, DELTA, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    H, N_q, N_k, scale, TILE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 2 for dK and dV: one tile of keys, a loop over the queries."""
    bh, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = j * TILE + tl.arange(0, TILE)
    k = _load(K, k_strides, bh, H, keys, N_k, D, D_PAD)  # line 6
    v = _load(V, v_strides, bh, H, keys, N_k, D, D_PAD)
    dk, dv = tl.zeros([TILE, D_PAD], tl.float32), tl.zeros([TILE, D_PAD], tl.float32)  # line 7
    first = j * TILE if CAUSAL else 0  # no earlier query sees these keys
    for start in tl.range(first, N_q, TILE):  # line 8
        rows = start + tl.arange(0, TILE)
        q = _load(Q, q_strides, bh, H, rows, N_q, D, D_PAD)  # line 9
        do = _load(dO, do_strides, bh, H, rows, N_q, D, D_PAD)
        lse = tl.load(L + bh * N_q + rows, mask=rows < N_q, other=0.0)
        delta = tl.load(DELTA + bh * N_q + rows, mask=rows < N_q, other=0.0)
        p = tl.exp(_scores(q, k, rows, keys, scale, N_k, CAUSAL, PRECISION) - lse[:, None])  # lines 10 and 11
        dv += _dot(p.T.to(do.dtype), do, PRECISION)  # line 12
        ds = p * (_dot(do, v.T, PRECISION) - delta[:, None])  # lines 13 and 14
        dk += _dot(ds.T.to(q.dtype), q, PRECISION)  # line 16
    _store(dK, dk_strides, dk * scale, bh, H, keys, N_k, D, D_PAD)  # line 18
    _store(dV, dv_strides, dv, bh, H, keys, N_k, D, D_PAD)


def flash_triton_simple(
    q: Float[Tensor, "... N_q D"], k: Float[Tensor, "... N_k D"], v: Float[Tensor, "... N_k D"], is_causal: bool = False
) -> Float[Tensor, "... N_q D"]:
    """softmax(q k^T / sqrt(D)) v in float32, bfloat16 or float16, for D up to 128, any lengths and strides.

    Runs where `flash_triton` runs. float32 products follow `torch.get_float32_matmul_precision()`. The same inputs
    give the same bits. k has as many heads as q. Raises ValueError naming the argument that it does not accept.
    """
    return FlashAttentionTritonSimple.call(q, k, v, is_causal)


def _check_supported(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    check_qkv(q, k, v, is_causal, dtypes=dtypes, max_head_size=128, equal_heads="flash_triton_simple")


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    _check_supported(q, k, v, is_causal)
    check_device(q, "flash_triton_simple")
    if (outputs := empty_outputs(q, k)) is not None:
        return outputs
    o, logsumexp = new_outputs(q)
    _launch(_forward_kernel, q.shape[-2], is_causal, dict(Q=q, K=k, V=v, O=o), L=logsumexp)
    return o, logsumexp


def _backward(dO: Tensor, saved: Saved, need_dq: bool, need_dkv: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, logsumexp, is_causal, _ = saved
    dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
    delta = (dO.float() * o.float()).sum(-1).contiguous()  # Algorithm 2, line 4
    inputs, vectors = dict(Q=q, K=k, V=v, dO=dO), dict(L=logsumexp, DELTA=delta)
    if need_dq:
        _launch(_dq_kernel, q.shape[-2], is_causal, inputs | dict(dQ=dq), **vectors)
    if need_dkv:
        _launch(_dkv_kernel, k.shape[-2], is_causal, inputs | dict(dK=dk, dV=dv), **vectors)
    return dq, dk, dv


def _launch(kernel: Any, length: int, is_causal: bool, tensors: dict[str, Tensor], **vectors: Tensor) -> None:
    """Run one program for each head and each tile of the `length` rows that the kernel divides."""
    tensors = {name: as_4d(x) for name, x in tensors.items()}
    q, (b, h, n_q, d), n_k = tensors["Q"], tensors["Q"].shape, tensors["K"].shape[2]
    tile = 64 if d <= 64 and q.dtype != torch.float32 else 32  # so that a program's tiles fit in its registers
    precision = "tf32" if q.dtype == torch.float32 and allows_tf32() else "ieee"
    strides = {f"{name.lower()}_strides": x.stride() for name, x in tensors.items()}
    with torch.cuda.device_of(q):
        kernel[(b * h, triton.cdiv(length, tile))](
            **tensors, **vectors, **strides, H=h, N_q=n_q, N_k=n_k, scale=1 / math.sqrt(d),
            TILE=tile, D=d, D_PAD=max(16, triton.next_power_of_2(d)), CAUSAL=is_causal, PRECISION=precision,
        )  # fmt: skip


FlashAttentionTritonSimple = flash_function("flash_triton_simple", _forward, _backward, _check_supported)
