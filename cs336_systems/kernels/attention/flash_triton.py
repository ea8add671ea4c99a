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
    L2, DELTA      (B * H, N_PAD) L in base 2 and rowsum(do * o), for the walk along the queries. N_PAD is a multiple of
                   every tile, so that this walk needs no masks: beyond N_q L2 is infinite, and the probability 0
    sc             log2(e) / sqrt(D): exp(s / sqrt(D)) = exp2(s * sc), and exp2 is what the hardware has
    TMA            tensors come as descriptors and are moved by the copy engine of Hopper; otherwise by pointers

What it does not do: dropout, masks other than causal, fewer key heads than query heads.
"""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .contract import as_4d, check_qkv
from .function import flash_function, new_gradients, new_outputs

MAX_HEAD_SIZE = 256
TMA_FROM_SCORES = 2**26
"""Descriptors are used from this many scores (B H N_q N_k) on."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRET = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels on the CPU: TRITON_INTERPRET=1, read when this module is imported."""

_LOG2_E = math.log2(math.e)
_PAD = 128  # no tile is longer
_LN_2 = tl.constexpr(math.log(2))
_LOG2_E_CONSTANT = tl.constexpr(_LOG2_E)
_INTERPRET = tl.constexpr(INTERPRET)


# ---------------------------------------------------------------------------------------------------------------------
# Tile configurations
# ---------------------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """How one pass cuts its work: queries and keys of a tile, and what the compiler is to make of a program."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    HEADS_FIRST: bool = False
    """Neighbouring programs take the same rows of different heads, rather than different rows of one head."""


@functools.cache
def tile_table() -> dict[str, Tile]:
    """The measured tiles, by `tile_key`. `tune.py` beside this module measures them again."""
    rows = json.loads(Path(__file__).with_name("flash_triton_tiles.json").read_text())
    return {key: Tile(**tile) for key, tile in rows.items()}


def tile_key(phase: str, d_pad: int, dtype: torch.dtype, tma: bool) -> str:
    """The phase (forward, dq or dkv), the padded head size, and float, half or half-tma (16 bits by copy engine)."""
    return f"{phase}-{d_pad}-" + ("float" if dtype == torch.float32 else "half-tma" if tma else "half")


def _tile(phase: str, q: Tensor, tma: bool) -> Tile:
    if INTERPRET:  # small, so that a short test has several tiles, whole and partial
        return Tile(BM=32, BN=16, num_warps=4, num_stages=1)
    return tile_table()[tile_key(phase, padded_head_size(q.shape[-1]), q.dtype, tma)]


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
def _program(num_blocks, HEADS_FIRST: tl.constexpr):
    """This program's block and bh. One grid axis: the others end at 65,535."""
    program = tl.program_id(0)
    if HEADS_FIRST:
        num_heads = tl.num_programs(0) // num_blocks
        block, bh = program // num_heads, program % num_heads
    else:
        block, bh = program % num_blocks, program // num_blocks
    return block, bh


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


@triton.jit
def _forward_kernel(
    q_, k_, v_, o_, L, q_strides, k_strides, v_strides, o_strides, sc, H, N_q, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of queries: o and L."""
    num_blocks = tl.cdiv(N_q, BM)
    block, bh = _program(num_blocks, HEADS_FIRST)
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
def _dq_kernel(
    q_, k_, v_, o_, do_, dq_, L, L2, DELTA, q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides,
    sc, scale, H, N_q, N_k, N_PAD,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAUSAL: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, HEADS_FIRST: tl.constexpr, NEED_DQ: tl.constexpr,
):  # fmt: skip
    """One tile of queries: L2 and DELTA for the other walk, and dq."""
    num_blocks = tl.cdiv(N_PAD, BM)
    block, bh = _program(num_blocks, HEADS_FIRST)
    b, h = bh // H, bh % H
    m0 = (num_blocks - 1 - block) * BM
    rows = m0 + tl.arange(0, BM)
    do = _load(do_, do_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
    o = _load(o_, o_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    l2 = tl.load(L + tl.cast(bh, tl.int64) * N_q + rows, mask=rows < N_q, other=float("inf")) * _LOG2_E_CONSTANT
    padded = tl.cast(bh, tl.int64) * N_PAD + rows
    tl.store(L2 + padded, l2)
    tl.store(DELTA + padded, delta)
    if NEED_DQ and m0 < N_q:
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


@triton.jit
def _dkv_queries(
    dk, dv, k, v, q_, do_, L2, DELTA, q_strides, do_strides, b, h, bh, n0, lo, hi, sc, N_q, N_PAD,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 11 to 14 and 16, along the queries lo to hi.

    All scores are transposed, (BN, BM): the probabilities then leave one matrix product in the registers in which the
    next takes its left operand.
    """
    for m0 in tl.range(lo, hi, BM):
        q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
        rows = m0 + tl.arange(0, BM)
        # These vectors by descriptors too: with pointers their latency would be waited for in every tile.
        l2 = L2.load([bh, m0]).reshape(BM) if TMA else tl.load(L2 + tl.cast(bh, tl.int64) * N_PAD + rows)
        st = _scores(k, q, PRECISION)
        do = _load(do_, do_strides, b, h, m0, N_q, BM, D, D_PAD, TMA, True)
        pt = tl.exp2(st * sc - l2[None, :])
        if MASKED:
            pt = tl.where(rows[None, :] >= (n0 + tl.arange(0, BN))[:, None], pt, 0.0)
        dv = _dot(pt.to(k.dtype), do, dv, PRECISION)
        delta = DELTA.load([bh, m0]).reshape(BM) if TMA else tl.load(DELTA + tl.cast(bh, tl.int64) * N_PAD + rows)
        dpt = _scores(v, do, PRECISION)
        dst = pt * (dpt - delta[None, :])
        dk = _dot(dst.to(k.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit
def _dkv_kernel(
    q_, k_, v_, do_, dk_, dv_, L2, DELTA, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides,
    sc, scale, H, N_q, N_k, N_PAD,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dk and dv. Keys beyond N_k give rows that are not stored, so they need no mask."""
    block, bh = _program(tl.cdiv(N_k, BN), HEADS_FIRST)
    b, h = bh // H, bh % H
    n0 = block * BN
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
            dk, dv, k, v, q_, do_, L2, DELTA, q_strides, do_strides, b, h, bh, n0, first, lo, sc, N_q, N_PAD,
            BM, BN, D, D_PAD, True, TMA, PRECISION,
        )  # fmt: skip
    dk, dv = _dkv_queries(
        dk, dv, k, v, q_, do_, L2, DELTA, q_strides, do_strides, b, h, bh, n0, lo, N_q, sc, N_q, N_PAD,
        BM, BN, D, D_PAD, False, TMA, PRECISION,
    )  # fmt: skip
    _store(dk_, dk_strides, (dk * scale).to(k.dtype), b, h, n0, N_k, BN, D, D_PAD, TMA)
    _store(dv_, dv_strides, dv.to(k.dtype), b, h, n0, N_k, BN, D, D_PAD, TMA)


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


def _can_use_tma(*tensors: Tensor) -> bool:
    """Whether the copy engine can move these (B, H, N, D) tensors: 16-byte rows, no repeated ones, no empty axis."""

    def movable(x: Tensor) -> bool:
        steps = [step for step, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
        aligned = all(step > 0 and step * x.element_size() % 16 == 0 for step in steps)
        return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and aligned

    return all(map(movable, tensors))


def _use_tma(q: Tensor, k: Tensor, *others: Tensor) -> bool:
    if not INTERPRET:
        if _capability(q.device) < (9, 0) or q.dtype == torch.float32:
            return False
        # Descriptors make a launch some 30 us longer on the host, which a short kernel cannot hide.
        if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] < TMA_FROM_SCORES:
            return False
    return _can_use_tma(q, k, *others)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _operands(pairs: Sequence[tuple[Tensor, int]], tma: bool) -> tuple[list[Any], list[tuple[int, ...]]]:
    """Tensors as a kernel takes them, each with the rows of its tiles, and their strides."""
    strides = [x.stride() for x, _ in pairs]
    if not tma:
        return [x for x, _ in pairs], strides
    return [_descriptor(x, rows) for x, rows in pairs], strides


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    # The stride of an axis of length 1 is never used but has to be valid.
    strides = [step if size > 1 else x.shape[-1] * 16 for step, size in zip(x.stride(), x.shape, strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:-1], 1], [1, 1, rows, padded_head_size(x.shape[-1])])


def _constants(q: Tensor, k: Tensor, is_causal: bool, tile: Tile, tma: bool) -> dict[str, Any]:
    """The arguments that all kernels share."""
    d = q.shape[-1]
    exact = torch.get_float32_matmul_precision() == "highest"
    return dict(
        sc=_LOG2_E / math.sqrt(d),
        H=q.shape[1],
        N_q=q.shape[2],
        N_k=k.shape[2],
        D=d,
        D_PAD=padded_head_size(d),
        CAUSAL=is_causal,
        TMA=tma,
        PRECISION="ieee" if exact else "tf32",
        **tile._asdict(),
    )


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, logsumexp: Tensor, is_causal: bool, tile: Tile, tma: bool
) -> None:
    """Fill o and logsumexp; all tensors are (B, H, N, D)."""
    operands, strides = _operands(((q, tile.BM), (k, tile.BN), (v, tile.BN), (o, tile.BM)), tma)
    grid = (triton.cdiv(q.shape[2], tile.BM) * q.shape[0] * q.shape[1],)
    _forward_kernel[grid](*operands, logsumexp, *strides, **_constants(q, k, is_causal, tile, tma))


def launch_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    dq: Tensor | None,
    logsumexp: Tensor,
    l2: Tensor,
    delta: Tensor,
    is_causal: bool,
    tile: Tile,
    tma: bool,
) -> None:
    """Fill l2 and delta, both (B * H, N_PAD), and dq where it is wanted."""
    pairs = ((q, tile.BM), (k, tile.BN), (v, tile.BN), (o, tile.BM), (do, tile.BM), (q if dq is None else dq, tile.BM))
    operands, strides = _operands(pairs, tma)
    _dq_kernel[(l2.shape[1] // tile.BM * l2.shape[0],)](
        *operands,
        logsumexp,
        l2,
        delta,
        *strides,
        scale=1 / math.sqrt(q.shape[-1]),
        N_PAD=l2.shape[1],
        NEED_DQ=dq is not None,
        **_constants(q, k, is_causal, tile, tma),
    )


def launch_dkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dk: Tensor,
    dv: Tensor,
    l2: Tensor,
    delta: Tensor,
    is_causal: bool,
    tile: Tile,
    tma: bool,
) -> None:
    """Fill dk and dv from what `launch_dq` left in l2 and delta."""
    pairs = ((q, tile.BM), (k, tile.BN), (v, tile.BN), (do, tile.BM), (dk, tile.BN), (dv, tile.BN))
    operands, strides = _operands(pairs, tma)
    _dkv_kernel[(triton.cdiv(k.shape[2], tile.BN) * l2.shape[0],)](
        *operands,
        *(TensorDescriptor(x, list(x.shape), list(x.stride()), [1, tile.BM]) if tma else x for x in (l2, delta)),
        *strides,
        scale=1 / math.sqrt(q.shape[-1]),
        N_PAD=l2.shape[1],
        **_constants(q, k, is_causal, tile, tma),
    )


def padded_head_size(d: int) -> int:
    """The columns that a tile has in the kernels: a power of two, and at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(d))


def new_vectors(q: Tensor) -> tuple[Tensor, Tensor]:
    """Unfilled l2 and delta for q (B, H, N_q, D)."""
    l2, delta = q.new_empty(2, q.shape[0] * q.shape[1], triton.cdiv(q.shape[2], _PAD) * _PAD, dtype=torch.float32)
    return l2, delta


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_qkv(q, k, v, dtypes=DTYPES, max_head_size=MAX_HEAD_SIZE)
    if INTERPRET:
        return
    if not q.is_cuda:
        raise ValueError(
            f"q is on {q.device}: flash_triton needs a CUDA device, or TRITON_INTERPRET=1 in the environment, "
            "with which Triton's interpreter runs it slowly on a CPU"
        )
    if _capability(q.device) < (8, 0):
        raise ValueError(f"q is on {torch.cuda.get_device_name(q.device)}: flash_triton needs compute capability 8.0")


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """o and logsumexp; see `flash_triton` for what is accepted."""
    _check(q, k, v)
    o, logsumexp = new_outputs(q)
    if o.numel() == 0:
        return o, logsumexp
    if k.shape[-2] == 0:
        return o.zero_(), logsumexp.fill_(float("-inf"))
    q4, k4, v4, o4 = map(as_4d, (q, k, v, o))
    tma = _use_tma(q4, k4, v4, o4)
    with torch.cuda.device_of(q):
        launch_forward(q4, k4, v4, o4, logsumexp, is_causal, _tile("forward", q, tma), tma)
    return o, logsumexp


def backward(
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
    q4, k4, v4, o4, do4 = map(as_4d, (q, k, v, o, do))
    tma = _use_tma(q4, k4, v4, o4)
    if tma and not _can_use_tma(do4):
        do4 = do4.contiguous()  # what sum().backward() gives is one number, expanded
    l2, delta = new_vectors(q4)
    with torch.cuda.device_of(q):
        dq4 = as_4d(dq) if need_dq else None
        launch_dq(q4, k4, v4, o4, do4, dq4, logsumexp, l2, delta, is_causal, _tile("dq", q, tma), tma)
        if need_dkv:
            tile = _tile("dkv", q, tma)
            launch_dkv(q4, k4, v4, do4, as_4d(dk), as_4d(dv), l2, delta, is_causal, tile, tma)
    return dq, dk, dv


# ---------------------------------------------------------------------------------------------------------------------
# The public functions
# ---------------------------------------------------------------------------------------------------------------------

FlashAttentionTriton = flash_function("flash_triton", forward, backward)


def flash_triton(
    q: Float[Tensor, "... N_q D"],
    k: Float[Tensor, "... N_k D"],
    v: Float[Tensor, "... N_k D"],
    is_causal: bool = False,
) -> Float[Tensor, "... N_q D"]:
    """FlashAttention-2 in Triton: softmax(q k^T / sqrt(D)) v without the N_q x N_k scores in memory.

    On a CUDA device of compute capability 8.0 or later, or on a CPU in Triton's interpreter. float32, bfloat16 and
    float16; D from 1 to 256; any lengths, strides and leading dimensions (more than two are flattened, which copies
    where strides do not allow a view). float32 products follow `torch.get_float32_matmul_precision()`. Needs O(N)
    memory beyond its outputs: two float32 vectors in the backward pass. The same inputs give the same bits.

    Raises ValueError naming the argument that it does not take.
    """
    return FlashAttentionTriton.apply(q, k, v, is_causal)
