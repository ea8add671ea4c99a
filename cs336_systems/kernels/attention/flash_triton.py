"""FlashAttention-2 in Triton, forward and backward (Dao 2023, FlashAttention-2, Algorithms 1 and 2).

The forward pass walks the keys of one tile of queries and keeps a running maximum and sum (online softmax). The
backward pass computes the probabilities again from the logsumexp, twice: once along the keys for dQ, once along the
queries for dK and dV. That costs two matrix products more than a single walk that adds to dQ with atomics, and gives
the same bits every time.

Legend
    B, H           batch and heads; bh = b * H + h; a tensor is reached as [b, h, row, column]
    N_q, N_k, D    queries, keys, head size; D_PAD is D rounded up to a power of two, at least 16
    BM, BN         queries and keys of a tile
    q, k, v, o     (B, H, N, D) tensors with any strides; do, dq, dk, dv their gradients
    L              (B, H, N_q) logsumexp of the scaled scores, natural logarithm
    VECTORS        (2 * B * H, N_PAD) L in base 2 of all heads, then delta = rowsum(do * o) of all heads, for the walk
                   along the queries. N_PAD is a multiple of every tile, so that this walk needs no masks: beyond N_q
                   the first is infinite, and the probability 0
    sc             scale * log2(e), scale = 1 / sqrt(D): exp(s * scale) = exp2(s * sc); the hardware has exp2
    GROUP          heads that are worked on at the same time
    TMA            tensors come as descriptors and are moved by the copy engine of Hopper; otherwise by pointers

What it does not do: dropout, masks other than causal, fewer key heads than query heads.
"""

import contextlib
import functools
import json
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from ..launch import INTERPRET, Launch, can_use_descriptors, has_copy_engine
from .contract import as_4d, check_qkv
from .flash_torch import compiled_backward
from .function import flash_function, new_gradients, new_outputs

MAX_HEAD_SIZE = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# On the number of scores, B H N_q N_k, depends what is launched.
TMA_FROM_SCORES = 2**27
"""From here on tensors are moved by descriptors. They make a launch some 30 us longer on the host."""
ONE_LAUNCH_BELOW_SCORES = 2**26
"""Below this the backward pass is one launch, which does more work but waits less for the host."""

_LN_2 = tl.constexpr(math.log(2))
_LOG2_E = tl.constexpr(math.log2(math.e))
_PAD = tl.constexpr(128)  # no tile is longer
_INTERPRET = tl.constexpr(INTERPRET)
_LENGTHS = ["H", "N_q", "N_k", "GROUP"]  # no kernel is compiled anew for a length that is 1 or a multiple of 16


# ---------------------------------------------------------------------------------------------------------------------
# Tile configurations
# ---------------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How one phase cuts its work: queries and keys of a tile, and what the compiler is to make of a program."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


@functools.cache
def tile_table() -> dict[str, Tile]:
    """The measured tiles, by `tile_key`. `tune.py` beside this module measures them again."""
    rows = json.loads(Path(__file__).with_name("flash_triton_tiles.json").read_text())
    return {key: Tile(**tile) for key, tile in rows.items()}


def tile_key(phase: str, d: int, dtype: torch.dtype, tma: bool) -> str:
    """The phase (forward, dq, dkv, or backward for both), the padded head size, and float, half or half-tma.

    half-tma is for 16 bits moved by the copy engine.
    """
    kind = "float" if dtype == torch.float32 else "half-tma" if tma else "half"
    return f"{phase}-{padded_head_size(d)}-{kind}"


def padded_head_size(d: int) -> int:
    """The columns that a tile has in the kernels: a power of two, and at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(d))


def _tile(phase: str, q: Tensor, tma: bool) -> Tile:
    if INTERPRET:  # small, so that a short test has several tiles, whole and partial
        return Tile(BM=32, BN=16, num_warps=4, num_stages=1)
    properties: Any = torch.cuda.get_device_properties(q.device)
    if properties.shared_memory_per_block_optin < 160 * 1024:
        return Tile(BM=32, BN=32, num_warps=4, num_stages=2)  # the table is for the larger cards; this fits all
    return tile_table()[tile_key(phase, q.shape[-1], q.dtype, tma)]


# ---------------------------------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _pointers(x, strides, b, h, row, ROWS: tl.constexpr, D_PAD: tl.constexpr):
    # 64 bits up to the first element of the tile; inside a tile 32 are enough and cost fewer registers.
    start = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    start += tl.cast(row, tl.int64) * strides[2]
    return start + tl.arange(0, ROWS)[:, None] * strides[2] + tl.arange(0, D_PAD)[None, :] * strides[3]


@triton.jit
def _load(
    x, strides, b, h, row, N,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(ROWS, D_PAD) elements of x[b, h] from `row`; zero beyond D and, where there is an EDGE, beyond row N."""
    if TMA:
        tile = x.load([b, h, row, 0]).reshape(ROWS, D_PAD)
    else:
        pointers = _pointers(x, strides, b, h, row, ROWS, D_PAD)
        column_ok = (tl.arange(0, D_PAD) < D)[None, :]
        row_ok = (row + tl.arange(0, ROWS) < N)[:, None]
        if EDGE and D < D_PAD:
            tile = tl.load(pointers, mask=row_ok & column_ok, other=0.0)
        elif EDGE:
            tile = tl.load(pointers, mask=row_ok, other=0.0)
        elif D < D_PAD:
            tile = tl.load(pointers, mask=column_ok, other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _store(x, strides, tile, b, h, row, N, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TMA: tl.constexpr):
    if TMA:  # the copy engine leaves out what is beyond the tensor
        x.store([b, h, row, 0], tile.reshape(1, 1, ROWS, D_PAD))
    else:
        ok = (row + tl.arange(0, ROWS) < N)[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
        tl.store(_pointers(x, strides, b, h, row, ROWS, D_PAD), tile, mask=ok)


@triton.jit
def _dot(a, b, accumulator, PRECISION: tl.constexpr):
    if _INTERPRET:  # which multiplies the bits of bfloat16 as if they were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def _scores(a, b, PRECISION: tl.constexpr):
    """a b^T."""
    return _dot(a, b.T, tl.zeros([a.shape[0], b.shape[0]], tl.float32), PRECISION)


@triton.jit
def _visible(rows, columns, N_k, CAUSAL: tl.constexpr):
    """Which of the queries `rows` see which of the keys `columns`."""
    visible = (columns < N_k)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= columns[None, :])
    return visible


@triton.jit
def _program(num_blocks, GROUP):
    """This program's block and bh. One grid axis: the others end at 65,535.

    Heads come in groups whose tensors fit the L2 cache together. In a group the first block of all heads comes before
    the second: with the longest blocks first, what is left for the end is short.
    """
    program = tl.program_id(0)
    num_heads = tl.num_programs(0) // num_blocks
    first = program // (num_blocks * GROUP) * GROUP
    size = tl.minimum(GROUP, num_heads - first)
    within = program - first * num_blocks
    return within // size, first + within % size


@triton.jit
def _key_ranges(m0, N_k, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr):
    """For the queries from m0: keys below the first number are seen by all of them, keys from the second by none."""
    if CAUSAL:
        full, end = tl.minimum(m0, N_k) // BN * BN, tl.minimum(m0 + BM, N_k)
    else:
        full, end = N_k // BN * BN, N_k
    return full, end


@triton.jit
def _forward_keys(
    acc, total, m, q, k_, v_, k_strides, v_strides, b, h, m0, lo, hi, sc, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, lines 6 to 11, over the keys lo to hi. m, the running maximum, is in units of base 2."""
    for n0 in tl.range(lo, hi, BN):
        k = _load(k_, k_strides, b, h, n0, N_k, BN, D, D_PAD, TMA, MASKED)
        s = _scores(q, k, PRECISION)
        if MASKED:
            s = tl.where(_visible(m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), N_k, CAUSAL), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * sc)
        p = tl.exp2(s * sc - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, TMA, MASKED)
        acc = _dot(p.to(q.dtype), v, acc, PRECISION)
        m = m_new
    return acc, total, m


@triton.jit(do_not_specialize=_LENGTHS)
def _forward_kernel(
    q_, k_, v_, o_, L, q_strides, k_strides, v_strides, o_strides, scale, H, N_q, N_k, GROUP,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries: o and L."""
    sc = scale * _LOG2_E
    num_blocks = tl.cdiv(N_q, BM)
    block, bh = _program(num_blocks, GROUP)
    b, h = bh // H, bh % H
    m0 = (num_blocks - 1 - block) * BM  # causal: the tile with the most keys starts first, and the short ones fill up
    q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
    acc = tl.zeros([BM, D_PAD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    full, end = _key_ranges(m0, N_k, BM, BN, CAUSAL)
    acc, total, m = _forward_keys(
        acc, total, m, q, k_, v_, k_strides, v_strides, b, h, m0, 0, full, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, False, TMA, PRECISION,
    )  # fmt: skip
    acc, total, m = _forward_keys(
        acc, total, m, q, k_, v_, k_strides, v_strides, b, h, m0, full, end, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, True, TMA, PRECISION,
    )  # fmt: skip
    rows = m0 + tl.arange(0, BM)
    tl.store(L + tl.cast(bh, tl.int64) * N_q + rows, (m + tl.log2(total)) * _LN_2, mask=rows < N_q)
    _store(o_, o_strides, (acc / total[:, None]).to(q.dtype), b, h, m0, N_q, BM, D, D_PAD, TMA)


@triton.jit
def _dq_keys(
    dq, q, do, l2, delta, k_, v_, k_strides, v_strides, b, h, m0, lo, hi, sc, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 11 to 14 and 15, along the keys lo to hi."""
    for n0 in tl.range(lo, hi, BN):
        k = _load(k_, k_strides, b, h, n0, N_k, BN, D, D_PAD, TMA, MASKED)
        s = _scores(q, k, PRECISION)
        v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, TMA, MASKED)
        dp = _scores(do, v, PRECISION)
        p = tl.exp2(s * sc - l2[:, None])
        if MASKED:  # after exp2, which may be infinite where a score beyond the mask is above the logsumexp
            p = tl.where(_visible(m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), N_k, CAUSAL), p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(q.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def _row_statistics(
    o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q,
    BM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """do, L in base 2 and delta = rowsum(do * o) for the queries from m0."""
    do = _load(do_, do_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
    o = _load(o_, o_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
    rows = m0 + tl.arange(0, BM)
    l2 = tl.load(L + tl.cast(bh, tl.int64) * N_q + rows, mask=rows < N_q, other=float("inf")) * _LOG2_E
    return do, l2, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def _dq_tile(
    q_, k_, v_, dq_, do, l2, delta, q_strides, k_strides, v_strides, dq_strides, b, h, m0, scale, N_q, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of the queries from m0."""
    sc = scale * _LOG2_E
    q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
    dq = tl.zeros([BM, D_PAD], tl.float32)
    full, end = _key_ranges(m0, N_k, BM, BN, CAUSAL)
    dq = _dq_keys(
        dq, q, do, l2, delta, k_, v_, k_strides, v_strides, b, h, m0, 0, full, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, False, TMA, PRECISION,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, do, l2, delta, k_, v_, k_strides, v_strides, b, h, m0, full, end, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, True, TMA, PRECISION,
    )  # fmt: skip
    _store(dq_, dq_strides, (dq * scale).to(q.dtype), b, h, m0, N_q, BM, D, D_PAD, TMA)


@triton.jit(do_not_specialize=_LENGTHS)
def _dq_kernel(
    q_, k_, v_, o_, do_, dq_, L, VECTORS, q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides,
    scale, H, N_q, N_k, GROUP,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, NEED_DQ: tl.constexpr,
):  # fmt: skip
    """One tile of queries: VECTORS for the other walk, and dq."""
    N_PAD = tl.cdiv(N_q, _PAD) * _PAD
    num_blocks = N_PAD // BM
    block, bh = _program(num_blocks, GROUP)
    b, h = bh // H, bh % H
    m0 = (num_blocks - 1 - block) * BM
    do, l2, delta = _row_statistics(o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q, BM, D, D_PAD, TMA)
    vectors = VECTORS + tl.cast(bh, tl.int64) * N_PAD + m0 + tl.arange(0, BM)
    tl.store(vectors, l2)
    tl.store(vectors + tl.cast(tl.num_programs(0) // num_blocks, tl.int64) * N_PAD, delta)
    if NEED_DQ and m0 < N_q:
        _dq_tile(
            q_, k_, v_, dq_, do, l2, delta, q_strides, k_strides, v_strides, dq_strides, b, h, m0, scale, N_q, N_k,
            BM, BN, D, D_PAD, CAUSAL, TMA, PRECISION,
        )  # fmt: skip


@triton.jit
def _dkv_queries(
    dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, h, bh, num_heads, n0, lo, hi, sc, N_q,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 11 to 14 and 16, along the queries lo to hi.

    All scores are transposed, (BN, BM): the probabilities then leave one matrix product in the registers in which the
    next takes its left operand.
    """
    N_PAD = tl.cdiv(N_q, _PAD) * _PAD
    for m0 in tl.range(lo, hi, BM):
        q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
        rows = m0 + tl.arange(0, BM)
        if ALONE:
            do, l2, delta = _row_statistics(o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q, BM, D, D_PAD, TMA)
        elif TMA:  # by pointers the latency of these vectors would be waited for in every tile
            l2 = VECTORS.load([bh, m0]).reshape(BM)
        else:
            l2 = tl.load(VECTORS + tl.cast(bh, tl.int64) * N_PAD + rows)
        st = _scores(k, q, PRECISION)
        if not ALONE:
            do = _load(do_, do_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
        pt = tl.exp2(st * sc - l2[None, :])
        if MASKED:
            pt = tl.where(rows[None, :] >= (n0 + tl.arange(0, BN))[:, None], pt, 0.0)
        dv = _dot(pt.to(k.dtype), do, dv, PRECISION)
        if TMA and not ALONE:
            delta = VECTORS.load([num_heads + bh, m0]).reshape(BM)
        elif not ALONE:
            delta = tl.load(VECTORS + tl.cast(num_heads + bh, tl.int64) * N_PAD + rows)
        dpt = _scores(v, do, PRECISION)
        dst = pt * (dpt - delta[None, :])
        dk = _dot(dst.to(k.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit
def _dkv_tile(
    q_, k_, v_, o_, do_, dk_, dv_, L, VECTORS,
    q_strides, k_strides, v_strides, o_strides, do_strides, dk_strides, dv_strides,
    b, h, bh, num_heads, n0, scale, N_q, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys from n0. Keys beyond N_k give rows that are not stored, so they need no mask."""
    sc = scale * _LOG2_E
    k = _load(k_, k_strides, b, h, n0, N_k, BN, D, D_PAD, TMA, True)
    v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, TMA, True)
    dk = tl.zeros([BN, D_PAD], tl.float32)
    dv = tl.zeros([BN, D_PAD], tl.float32)
    lo = 0
    if CAUSAL:  # no query before the first key sees this tile; those from its last key on see all of it
        end = tl.cdiv(N_q, BM) * BM
        first = tl.minimum(n0 // BM * BM, end)
        lo = tl.minimum(tl.cdiv(n0 + BN, BM) * BM, end)
        dk, dv = _dkv_queries(
            dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, h, bh, num_heads, n0,
            first, lo, sc, N_q, BM, BN, D, D_PAD, True, TMA, PRECISION, ALONE,
        )  # fmt: skip
    dk, dv = _dkv_queries(
        dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, h, bh, num_heads, n0,
        lo, N_q, sc, N_q, BM, BN, D, D_PAD, False, TMA, PRECISION, ALONE,
    )  # fmt: skip
    _store(dk_, dk_strides, (dk * scale).to(k.dtype), b, h, n0, N_k, BN, D, D_PAD, TMA)
    _store(dv_, dv_strides, dv.to(k.dtype), b, h, n0, N_k, BN, D, D_PAD, TMA)


@triton.jit(do_not_specialize=_LENGTHS)
def _dkv_kernel(
    q_, k_, v_, do_, dk_, dv_, VECTORS, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    scale, H, N_q, N_k, GROUP,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dk and dv, with the VECTORS that `_dq_kernel` has left."""
    num_blocks = tl.cdiv(N_k, BN)
    block, bh = _program(num_blocks, GROUP)
    _dkv_tile(
        q_, k_, v_, do_, do_, dk_, dv_, VECTORS, VECTORS,  # o and L are not looked at
        q_strides, k_strides, v_strides, do_strides, do_strides, dk_strides, dv_strides,
        bh // H, bh % H, bh, tl.num_programs(0) // num_blocks, block * BN, scale, N_q, N_k,
        BM, BN, D, D_PAD, CAUSAL, TMA, PRECISION, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=_LENGTHS)
def _backward_kernel(
    q_, k_, v_, o_, do_, dq_, dk_, dv_, L,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, dk_strides, dv_strides,
    scale, H, N_q, N_k, GROUP,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Both walks in one launch, for work that is shorter than a launch: the one for dk and dv finds delta itself."""
    num_key_blocks, num_query_blocks = tl.cdiv(N_k, BN), tl.cdiv(N_q, BM)
    num_heads = tl.num_programs(0) // (num_key_blocks + num_query_blocks)
    block, bh = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    b, h = bh // H, bh % H
    if block < num_key_blocks:
        _dkv_tile(
            q_, k_, v_, o_, do_, dk_, dv_, L, L,
            q_strides, k_strides, v_strides, o_strides, do_strides, dk_strides, dv_strides,
            b, h, bh, num_heads, block * BN, scale, N_q, N_k, BM, BN, D, D_PAD, CAUSAL, TMA, PRECISION, True,
        )  # fmt: skip
    else:
        m0 = (num_key_blocks + num_query_blocks - 1 - block) * BM
        do, l2, delta = _row_statistics(o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q, BM, D, D_PAD, TMA)
        _dq_tile(
            q_, k_, v_, dq_, do, l2, delta, q_strides, k_strides, v_strides, dq_strides, b, h, m0, scale, N_q, N_k,
            BM, BN, D, D_PAD, CAUSAL, TMA, PRECISION,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


def forward_launch(q: Tensor, k: Tensor, v: Tensor, o: Tensor, is_causal: bool, tile: Tile, tma: bool) -> Launch:
    """The launch that takes (q, k, v, o, logsumexp), all but the last (B, H, N, D), and fills the last two."""
    rows = [tile.BM, tile.BN, tile.BN, tile.BM]
    num_programs = triton.cdiv(q.shape[2], tile.BM) * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), None]
    return Launch(_forward_kernel, num_programs, blocks, _constants([q, k, v, o], k, is_causal, tile, tma), *tile[2:])


def dq_launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, dq: Tensor | None, is_causal: bool, tile: Tile, tma: bool
) -> Launch:
    """The launch that takes (q, k, v, o, do, dq, logsumexp, vectors) and fills vectors and dq.

    Without dq, for which it then takes any tensor like q, it fills the vectors alone.
    """
    rows = [tile.BM, tile.BN, tile.BN, tile.BM, tile.BM, tile.BM]
    num_programs = _padded_length(q) // tile.BM * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), None, None]
    constants = _constants([q, k, v, o, do, q if dq is None else dq], k, is_causal, tile, tma)
    return Launch(_dq_kernel, num_programs, blocks, [*constants, dq is not None], *tile[2:])


def dkv_launch(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, dk: Tensor, dv: Tensor, is_causal: bool, tile: Tile, tma: bool
) -> Launch:
    """The launch that takes (q, k, v, do, dk, dv, vectors), the last from `dq_launch`, and fills dk and dv."""
    rows = [tile.BM, tile.BN, tile.BN, tile.BM, tile.BN, tile.BN]
    num_programs = triton.cdiv(k.shape[2], tile.BN) * q.shape[0] * q.shape[1]
    blocks = [*_blocks(q, rows, tma), [1, tile.BM] if tma else None]
    return Launch(
        _dkv_kernel, num_programs, blocks, _constants([q, k, v, do, dk, dv], q, is_causal, tile, tma), *tile[2:]
    )


def backward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    is_causal: bool,
    tile: Tile,
    tma: bool = False,
) -> Launch:
    """The launch that takes (q, k, v, o, do, dq, dk, dv, logsumexp) and fills dq, dk and dv."""
    rows = [tile.BM, tile.BN, tile.BN, tile.BM, tile.BM, tile.BM, tile.BN, tile.BN]
    num_blocks = triton.cdiv(q.shape[2], tile.BM) + triton.cdiv(k.shape[2], tile.BN)
    constants = _constants([q, k, v, o, do, dq, dk, dv], q, is_causal, tile, tma)
    num_programs = num_blocks * q.shape[0] * q.shape[1]
    return Launch(_backward_kernel, num_programs, [*_blocks(q, rows, tma), None], constants, *tile[2:])


def _blocks(q: Tensor, rows: list[int], tma: bool) -> list[list[int] | None]:
    return [[1, 1, count, padded_head_size(q.shape[-1])] if tma else None for count in rows]


def _constants(operands: list[Tensor], walked: Tensor, is_causal: bool, tile: Tile, tma: bool) -> list[Any]:
    """What follows the tensors in every kernel's arguments; `walked` is one of the two tensors of the inner loop."""
    q, k = operands[:2]
    d = q.shape[-1]
    exact = torch.get_float32_matmul_precision() == "highest"
    scalars = [1 / math.sqrt(d), q.shape[1], q.shape[2], k.shape[2], _heads_together(walked)]
    return [
        *(x.stride() for x in operands),
        *scalars,
        tile.BM,
        tile.BN,
        d,
        padded_head_size(d),
        is_causal,
        tma,
        "ieee" if exact else "tf32",
    ]


def _heads_together(walked: Tensor) -> int:
    """How many heads have both tensors of the inner loop in half of the L2 cache; at least one."""
    if INTERPRET:
        return 2
    head_bytes = 2 * walked.shape[2] * walked.shape[3] * walked.element_size()
    return max(1, torch.cuda.get_device_properties(walked.device).L2_cache_size // 2 // head_bytes)


def _padded_length(q: Tensor) -> int:
    return -(-q.shape[2] // _PAD.value) * _PAD.value


def new_vectors(q: Tensor) -> Tensor:
    """Unfilled room for what `dq_launch` leaves to `dkv_launch`, for q (B, H, N_q, D)."""
    return torch.empty((2 * q.shape[0] * q.shape[1], _padded_length(q)), dtype=torch.float32, device=q.device)


def _use_tma(q: Tensor, k: Tensor, *others: Tensor) -> bool:
    if _num_scores(q, k) < TMA_FROM_SCORES:
        return False
    if not INTERPRET and (q.dtype == torch.float32 or not has_copy_engine(q.device)):
        return False
    return can_use_descriptors(q, k, *others)


def _num_scores(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]


_LAUNCHES: dict[tuple[Any, ...], tuple[Launch, ...]] = {}


def _key(is_causal: bool, *tensors: Tensor) -> tuple[Any, ...]:
    """All that the choice of a launch depends on."""
    facts = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    return is_causal, torch.get_float32_matmul_precision(), *facts


def _remember(key: tuple[Any, ...], *launches: Launch) -> tuple[Launch, ...]:
    if len(_LAUNCHES) >= 4096:  # a length after another, as in sampling
        _LAUNCHES.clear()
    _LAUNCHES[key] = launches
    return launches


def _device_guard(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    # The guard alone costs more than it takes to see that there is nothing to do.
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_qkv(q, k, v, dtypes=DTYPES, max_head_size=MAX_HEAD_SIZE)
    if INTERPRET:
        return
    if not q.is_cuda:
        raise ValueError(
            f"q is on {q.device}: flash_triton needs a CUDA device, or TRITON_INTERPRET=1 in the environment, "
            "with which Triton's interpreter runs it slowly on a CPU"
        )
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        raise ValueError(f"q is on {torch.cuda.get_device_name(q.device)}: flash_triton needs compute capability 8.0")


def _backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dq: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    is_causal: bool,
    need_dkv: bool,
) -> tuple[Launch, ...]:
    tma = _use_tma(q, k, v, o, do)
    if not tma and dq is not None and need_dkv and _num_scores(q, k) < ONE_LAUNCH_BELOW_SCORES:
        return (backward_launch(q, k, v, o, do, dq, dk, dv, is_causal, _tile("backward", q, tma)),)
    dq_tile, dkv_tile = _tile("dq", q, tma), _tile("dkv", q, tma)
    return (
        dq_launch(q, k, v, o, do, dq, is_causal, dq_tile, tma),
        dkv_launch(q, k, v, do, dk, dv, is_causal, dkv_tile, tma),
    )


def flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """o and logsumexp; see `flash_triton` for what is accepted."""
    key = _key(is_causal, q, k, v)
    launches = _LAUNCHES.get(key)
    if launches is None:
        _check(q, k, v)
    o, logsumexp = new_outputs(q)
    if o.numel() == 0:
        return o, logsumexp
    if k.shape[-2] == 0:
        return o.zero_(), logsumexp.fill_(float("-inf"))
    q4, k4, v4, o4 = as_4d(q), as_4d(k), as_4d(v), as_4d(o)
    with _device_guard(q):
        if launches is None:
            tma = _use_tma(q4, k4, v4, o4)
            launches = _remember(key, forward_launch(q4, k4, v4, o4, is_causal, _tile("forward", q, tma), tma))
        launches[0](q4, k4, v4, o4, logsumexp)
    return o, logsumexp


def flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    need_dq: bool,
    need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, each of no elements where it is not needed."""
    dq, dk, dv = new_gradients(q, k, v, need_dq, need_dkv)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if do.stride(-1) != 1 or 0 in do.stride():
        do = do.contiguous()  # what sum().backward() gives is one number, expanded: slow to read, not for descriptors
    key = (need_dq, need_dkv, *_key(is_causal, do, q, k, v, o))
    launches = _LAUNCHES.get(key)
    q4, k4, v4, o4, do4 = as_4d(q), as_4d(k), as_4d(v), as_4d(o), as_4d(do)
    dq4 = as_4d(dq) if need_dq else None
    dk4, dv4 = (as_4d(dk), as_4d(dv)) if need_dkv else (k4, v4)
    with _device_guard(q):
        if launches is None:
            launches = _remember(key, *_backward_launches(q4, k4, v4, o4, do4, dq4, dk4, dv4, is_causal, need_dkv))
        if len(launches) == 1 and dq4 is not None:
            launches[0](q4, k4, v4, o4, do4, dq4, dk4, dv4, logsumexp)
        else:
            vectors = new_vectors(q4)
            launches[0](q4, k4, v4, o4, do4, q4 if dq4 is None else dq4, logsumexp, vectors)
            if need_dkv:
                launches[1](q4, k4, v4, do4, dk4, dv4, vectors)
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------------------------
# The public functions
# ---------------------------------------------------------------------------------------------------------------------

FlashAttentionTriton = flash_function("flash_triton", flash_forward, flash_backward)
FlashAttentionTritonCompiled = flash_function("flash_triton_compiled", flash_forward, compiled_backward)


def flash_triton(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
    backward: Literal["triton", "compiled"] = "triton",
) -> Float[Tensor, "... N_q D"]:
    """FlashAttention-2 in Triton: softmax(q k^T / sqrt(D)) v without the N_q x N_k scores in memory.

    On a CUDA device of compute capability 8.0 or later, or on a CPU in Triton's interpreter. float32, bfloat16 and
    float16; D from 1 to 256; any lengths, strides and leading dimensions (more than two are flattened, which copies
    where strides do not allow a view). float32 products follow `torch.get_float32_matmul_precision()`. Needs O(N)
    memory beyond its outputs: two float32 vectors in the backward pass. The same inputs give the same bits.

    `backward="compiled"` is the handout's partly-Triton variant: the forward pass in Triton, and `compiled_backward`,
    which holds N_q x N_k scores, for the gradients.

    Raises ValueError naming the argument that it does not take.
    """
    if backward not in ("triton", "compiled"):
        raise ValueError(f"backward is {backward!r}: it must be triton or compiled")
    function = FlashAttentionTriton if backward == "triton" else FlashAttentionTritonCompiled
    return function.apply(q, k, v, is_causal)
