"""The kernels of `flash_triton` (Dao 2023, FlashAttention-2, Algorithms 1 and 2).

Legend
    B, H           batch and heads of queries; bh = b * H + h; a tensor is indexed as [b, h, row, column]
    G              query heads that share a key head; keys have H // G heads
    N_q, N_k, D    queries, keys, head size; D_PAD is D rounded up to a power of two, at least 16
    BM, BN         queries and keys per tile; m0, n0 are the first query and the first key of a tile
    q, k, v, o     (B, H, N, D) tensors with any strides; do, dq, dk, dv are their gradients. q_ is the tensor, q a tile
    s, p           a tile of scores and of probabilities; dp, ds are their gradients. st, pt, dpt, dst are transposed
    L              (B, H, N_q) logsumexp of the scaled scores, natural logarithm; lse2 is a tile of it in base 2
    VECTORS        (2 * B * H, N_PAD): L in base 2 for all heads, then delta = rowsum(do * o) for all heads, for the
                   inner loop over queries. N_PAD is a multiple of every tile length, so this loop loads
                   VECTORS without a mask: beyond N_q L is infinite, so the probability is 0
    sc             scale * log2(e), scale = 1 / sqrt(D): exp(s * scale) = exp2(s * sc); the hardware has exp2
    HEADS          heads that are worked on at the same time
    PRECISION      how float32 is multiplied. "tf32": with 11 bits. "bf16x6": with 24 bits, as the sum of the six
                   largest products of the three bfloat16 parts of each operand. Six products on tensor cores take less
                   time than one by multiply-adds. "ieee": by multiply-adds, for the interpreter
    MOVE           how tiles are moved. "descriptors": by TMA, on Hopper and later; tensors are then
                   passed as descriptors. "pointers": with 32-bit offsets from the tile's first element. "far pointers":
                   with 64-bit offsets
    TOGETHER       wait for the keys and the values of a tile at once, before the first product. Otherwise the wait for
                   the values comes at their product, with a barrier of the compiler. With eight warps it keeps both
                   groups of four in step, so the exponentials of one cannot hide behind the products of the other
    EDGE           the tile may reach beyond the last row: the rows beyond it are loaded as zeros
    MASKED         some scores of the tile are hidden: by the causal mask, by the band or beyond the last key
    NEED_DQ        compute dq. Otherwise only VECTORS is filled
    BAND           what limits how far back a query sees: "none", "window" or "documents", which may have a window too
    band           (DOCUMENT_STARTS, DOCUMENT_ENDS, WINDOW): (B, N) first position of each position's document, the one
                   after its last, and the number of keys that a query sees at most
    limit          for a tile of queries, the first key that each query sees; for a tile of keys, the first query after
                   those that see each key. Not used where BAND is "none"
    acc, total, m  the output before the division by total; the paper's l and m (m in base 2, so m * ln(2) is its m)
    ALONE          no `dq_kernel` ran before: compute L in base 2 and delta here
"""

import math

import triton
import triton.language as tl

from ..launch import INTERPRET

PAD = 128
"""N_PAD is a multiple of this, and no tile is longer."""
_PAD = tl.constexpr(PAD)
_LN_2 = tl.constexpr(math.log(2))
_LOG2_E = tl.constexpr(math.log2(math.e))
_INTERPRET = tl.constexpr(INTERPRET)
_LENGTHS = ["H", "N_q", "N_k", "WINDOW", "HEADS"]  # no kernel is recompiled for a length of 1 or a multiple of 16


@triton.jit
def _pointers(x, strides, b, h, row, ROWS: tl.constexpr, D_PAD: tl.constexpr, MOVE: tl.constexpr):
    # 64-bit offset to the tile's first element; inside a tile 32 bits are nearly always enough and use fewer registers.
    start = x + tl.cast(b, tl.int64) * strides[0] + tl.cast(h, tl.int64) * strides[1]
    start += tl.cast(row, tl.int64) * strides[2]
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    if MOVE == "far pointers":
        rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    return start + rows[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def _load(
    x, strides, b, h, row, N,
    ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, MOVE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(ROWS, D_PAD) elements of x[b, h] from `row`; zero beyond D and, where there is an EDGE, beyond row N."""
    if MOVE == "descriptors":
        tile = x.load([b, h, row, 0]).reshape(ROWS, D_PAD)
    else:
        pointers = _pointers(x, strides, b, h, row, ROWS, D_PAD, MOVE)
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
def _store(
    x, strides, tile, b, h, row, N, ROWS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, MOVE: tl.constexpr
):
    if MOVE == "descriptors":  # TMA skips elements beyond the tensor
        x.store([b, h, row, 0], tile.reshape(1, 1, ROWS, D_PAD))
    else:
        ok = (row + tl.arange(0, ROWS) < N)[:, None] & (tl.arange(0, D_PAD) < D)[None, :]
        tl.store(_pointers(x, strides, b, h, row, ROWS, D_PAD, MOVE), tile, mask=ok)


@triton.jit
def _dot(a, b, accumulator, PRECISION: tl.constexpr):
    if _INTERPRET:  # the interpreter multiplies the bits of bfloat16 as if they were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def _scores(a, b, PRECISION: tl.constexpr):
    """a b^T."""
    return _dot(a, b.T, tl.zeros([a.shape[0], b.shape[0]], tl.float32), PRECISION)


@triton.jit
def _first_key(row, b, band, N, BAND: tl.constexpr):
    """The first key that a query sees, a number or a tile. It grows with the query."""
    starts, _, window = band
    row = tl.minimum(row, N - 1)
    first = tl.maximum(row - window + 1, 0)
    if BAND == "documents":
        first = tl.maximum(first, tl.load(starts + tl.cast(b, tl.int64) * N + row))
    return first


@triton.jit
def _after_query(column, b, band, N, BAND: tl.constexpr):
    """The first query after those that see a key, a number or a tile. It grows with the key."""
    _, ends, window = band
    after = column + window
    if BAND == "documents":
        after = tl.minimum(after, tl.load(ends + tl.cast(b, tl.int64) * N + tl.minimum(column, N - 1)))
    return after


@triton.jit
def _visible(rows, columns, limit, N_k, CAUSAL: tl.constexpr, BAND: tl.constexpr):
    """The mask of a tile of scores: whether the queries `rows` see the keys `columns`."""
    visible = (columns < N_k)[None, :]
    if CAUSAL:
        visible = visible & (rows[:, None] >= columns[None, :])
    if BAND != "none":
        visible = visible & (columns[None, :] >= limit[:, None])
    return visible


@triton.jit
def _program(num_blocks, HEADS):
    """This program's block and bh. The grid has one axis, because the others are limited to 65,535 programs.

    Heads come in groups whose tensors fit the L2 cache together. In a group the first block of all heads comes before
    the second one, so that the longest blocks start first and short ones fill the end.
    """
    program = tl.program_id(0)
    num_heads = tl.num_programs(0) // num_blocks
    first = program // (num_blocks * HEADS) * HEADS
    size = tl.minimum(HEADS, num_heads - first)
    within = program - first * num_blocks
    return within // size, first + within % size


@triton.jit
def _key_head(head, G: tl.constexpr):
    """The key head of a query head: for h as for bh."""
    return head // G


@triton.jit
def _query_head(key_head, g, G: tl.constexpr):
    """The g-th of the G query heads of a key head: for h as for bh."""
    return key_head * G + g


@triton.jit
def _key_ranges(m0, b, band, N_k, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, BAND: tl.constexpr):
    """The queries from m0 see no key before `begin` or from `end` on, and all see those from `inner` to `full`."""
    if CAUSAL:
        full, end = tl.minimum(m0, N_k) // BN * BN, tl.minimum(m0 + BM, N_k)
    else:
        full, end = N_k // BN * BN, N_k
    begin, inner = 0, 0
    if BAND != "none":
        begin = _first_key(m0, b, band, N_k, BAND) // BN * BN
        inner = tl.minimum(tl.cdiv(_first_key(m0 + BM - 1, b, band, N_k, BAND), BN) * BN, full)
    return begin, inner, full, end


@triton.jit
def _query_ranges(n0, b, band, N_q, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, BAND: tl.constexpr):
    """No query before `begin` or from `end` on sees any of the keys from n0; those from `full` to `inner` see all."""
    begin, full, inner, end = 0, 0, N_q, N_q
    if CAUSAL:
        padded = tl.cdiv(N_q, BM) * BM
        begin = tl.minimum(n0 // BM * BM, padded)
        full = tl.minimum(tl.cdiv(n0 + BN, BM) * BM, padded)
    if BAND != "none":
        end = tl.minimum(_after_query(n0 + BN - 1, b, band, N_q, BAND), N_q)
        full = tl.minimum(full, tl.cdiv(end, BM) * BM)
        inner = tl.maximum(_after_query(n0, b, band, N_q, BAND) // BM * BM, full)
    return begin, full, inner, end


@triton.jit
def _forward_keys(
    acc, total, m, q, k_, v_, k_strides, v_strides, b, h, m0, lo, hi, limit, sc, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAUSAL: tl.constexpr, BAND: tl.constexpr,
    MASKED: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Algorithm 1, lines 6 to 11, over the keys lo to hi."""
    for n0 in tl.range(lo, hi, BN):
        k = _load(k_, k_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, MASKED)
        if TOGETHER:
            v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, MASKED)
        s = _scores(q, k, PRECISION)
        if MASKED:
            visible = _visible(m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), limit, N_k, CAUSAL, BAND)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * sc)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # no score so far is above -inf; -inf - -inf is NaN
        p = tl.exp2(s * sc - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if not TOGETHER:
            v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, MASKED)
        acc = _dot(p.to(q.dtype), v, acc, PRECISION)
        m = m_new
    return acc, total, m


@triton.jit(do_not_specialize=_LENGTHS)
def forward_kernel(
    q_, k_, v_, o_, L, DOCUMENT_STARTS, q_strides, k_strides, v_strides, o_strides, scale, H, N_q, N_k, WINDOW, HEADS,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One tile of queries: o and L."""
    sc = scale * _LOG2_E
    num_blocks = tl.cdiv(N_q, BM)
    block, bh = _program(num_blocks, HEADS)
    b, h = bh // H, bh % H
    m0 = (num_blocks - 1 - block) * BM  # causal: the last tile is the longest, and starts first
    q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, MOVE, True)
    acc = tl.zeros([BM, D_PAD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    m = tl.full([BM], float("-inf"), tl.float32)
    key_head = _key_head(h, G)
    rows = m0 + tl.arange(0, BM)
    band = (DOCUMENT_STARTS, DOCUMENT_STARTS, WINDOW)  # the ends are not used
    limit = m0
    begin, inner, full, end = _key_ranges(m0, b, band, N_k, BM, BN, CAUSAL, BAND)
    if BAND != "none":
        limit = _first_key(rows, b, band, N_k, BAND)
        acc, total, m = _forward_keys(
            acc, total, m, q, k_, v_, k_strides, v_strides, b, key_head, m0, begin, inner, limit, sc, N_k,
            BM, BN, D, D_PAD, CAUSAL, BAND, True, MOVE, PRECISION, TOGETHER,
        )  # fmt: skip
    acc, total, m = _forward_keys(
        acc, total, m, q, k_, v_, k_strides, v_strides, b, key_head, m0, inner, full, limit, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, BAND, False, MOVE, PRECISION, TOGETHER,
    )  # fmt: skip
    acc, total, m = _forward_keys(
        acc, total, m, q, k_, v_, k_strides, v_strides, b, key_head, m0, full, end, limit, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, BAND, True, MOVE, PRECISION, TOGETHER,
    )  # fmt: skip
    tl.store(L + tl.cast(bh, tl.int64) * N_q + rows, (m + tl.log2(total)) * _LN_2, mask=rows < N_q)
    _store(o_, o_strides, (acc / total[:, None]).to(q.dtype), b, h, m0, N_q, BM, D, D_PAD, MOVE)


@triton.jit
def _dq_keys(
    dq, q, do, lse2, delta, k_, v_, k_strides, v_strides, b, h, m0, lo, hi, limit, sc, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, CAUSAL: tl.constexpr, BAND: tl.constexpr,
    MASKED: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 10, 11 and 13 to 15, over the keys lo to hi."""
    for n0 in tl.range(lo, hi, BN):
        k = _load(k_, k_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, MASKED)
        if TOGETHER:
            v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, MASKED)
        s = _scores(q, k, PRECISION)
        if not TOGETHER:
            v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, MASKED)
        dp = _scores(do, v, PRECISION)
        p = tl.exp2(s * sc - lse2[:, None])
        if MASKED:  # after exp2, which may be infinite where a masked score is above the logsumexp
            visible = _visible(m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), limit, N_k, CAUSAL, BAND)
            p = tl.where(visible, p, 0.0)
        ds = p * (dp - delta[:, None])
        dq = _dot(ds.to(q.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def _row_statistics(
    o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q,
    BM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, MOVE: tl.constexpr,
):  # fmt: skip
    """do, L in base 2 and delta = rowsum(do * o) for the queries from m0."""
    do = _load(do_, do_strides, b, h, m0, N_q, BM, D, D_PAD, MOVE, True)
    o = _load(o_, o_strides, b, h, m0, N_q, BM, D, D_PAD, MOVE, True)
    rows = m0 + tl.arange(0, BM)
    lse2 = tl.load(L + tl.cast(bh, tl.int64) * N_q + rows, mask=rows < N_q, other=float("inf")) * _LOG2_E
    return do, lse2, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def _dq_tile(
    q_, k_, v_, dq_, do, lse2, delta, q_strides, k_strides, v_strides, dq_strides, b, h, m0, band, scale, N_q, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """dq of the queries from m0."""
    sc = scale * _LOG2_E
    q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, MOVE, True)
    dq = tl.zeros([BM, D_PAD], tl.float32)
    key_head = _key_head(h, G)
    limit = m0
    begin, inner, full, end = _key_ranges(m0, b, band, N_k, BM, BN, CAUSAL, BAND)
    if BAND != "none":
        limit = _first_key(m0 + tl.arange(0, BM), b, band, N_k, BAND)
        dq = _dq_keys(
            dq, q, do, lse2, delta, k_, v_, k_strides, v_strides, b, key_head, m0, begin, inner, limit, sc, N_k,
            BM, BN, D, D_PAD, CAUSAL, BAND, True, MOVE, PRECISION, TOGETHER,
        )  # fmt: skip
    dq = _dq_keys(
        dq, q, do, lse2, delta, k_, v_, k_strides, v_strides, b, key_head, m0, inner, full, limit, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, BAND, False, MOVE, PRECISION, TOGETHER,
    )  # fmt: skip
    dq = _dq_keys(
        dq, q, do, lse2, delta, k_, v_, k_strides, v_strides, b, key_head, m0, full, end, limit, sc, N_k,
        BM, BN, D, D_PAD, CAUSAL, BAND, True, MOVE, PRECISION, TOGETHER,
    )  # fmt: skip
    _store(dq_, dq_strides, (dq * scale).to(q.dtype), b, h, m0, N_q, BM, D, D_PAD, MOVE)


@triton.jit(do_not_specialize=_LENGTHS)
def dq_kernel(
    q_, k_, v_, o_, do_, dq_, L, VECTORS, DOCUMENT_STARTS,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, scale, H, N_q, N_k, WINDOW, HEADS,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
    NEED_DQ: tl.constexpr,
):  # fmt: skip
    """One tile of queries: VECTORS for `dkv_kernel`, and dq."""
    N_PAD = tl.cdiv(N_q, _PAD) * _PAD
    num_blocks = N_PAD // BM
    block, bh = _program(num_blocks, HEADS)
    b, h = bh // H, bh % H
    m0 = (num_blocks - 1 - block) * BM
    do, lse2, delta = _row_statistics(o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q, BM, D, D_PAD, MOVE)
    vectors = VECTORS + tl.cast(bh, tl.int64) * N_PAD + m0 + tl.arange(0, BM)
    tl.store(vectors, lse2)
    tl.store(vectors + tl.cast(tl.num_programs(0) // num_blocks, tl.int64) * N_PAD, delta)
    if NEED_DQ and m0 < N_q:
        band = (DOCUMENT_STARTS, DOCUMENT_STARTS, WINDOW)
        _dq_tile(
            q_, k_, v_, dq_, do, lse2, delta, q_strides, k_strides, v_strides, dq_strides, b, h, m0, band,
            scale, N_q, N_k, BM, BN, D, D_PAD, G, CAUSAL, BAND, MOVE, PRECISION, TOGETHER,
        )  # fmt: skip


@triton.jit
def _dkv_queries(
    dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, h, bh, num_heads, n0, lo, hi, limit,
    sc, N_q, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BAND: tl.constexpr,
    MASKED: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, lines 10 to 14 and 16, over the queries lo to hi.

    All scores are transposed, (BN, BM): the probabilities then leave one matrix product in the registers in which the
    next takes its left operand.
    """
    N_PAD = tl.cdiv(N_q, _PAD) * _PAD
    for m0 in tl.range(lo, hi, BM):
        q = _load(q_, q_strides, b, h, m0, N_q, BM, D, D_PAD, MOVE, True)
        rows = m0 + tl.arange(0, BM)
        if ALONE:
            do, lse2, delta = _row_statistics(o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q, BM, D, D_PAD, MOVE)
        elif MOVE == "descriptors":  # pointer loads would expose the latency of these vectors in every tile
            lse2 = VECTORS.load([bh, m0]).reshape(BM)
        else:
            lse2 = tl.load(VECTORS + tl.cast(bh, tl.int64) * N_PAD + rows)
        st = _scores(k, q, PRECISION)
        if not ALONE:
            do = _load(do_, do_strides, b, h, m0, N_q, BM, D, D_PAD, MOVE, True)
        pt = tl.exp2(st * sc - lse2[None, :])
        if MASKED:
            visible = rows[None, :] >= (n0 + tl.arange(0, BN))[:, None]
            if BAND != "none":
                visible = visible & (rows[None, :] < limit[:, None])
            pt = tl.where(visible, pt, 0.0)
        dv = _dot(pt.to(k.dtype), do, dv, PRECISION)
        if MOVE == "descriptors" and not ALONE:
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
    b, h, bh, num_heads, n0, band, scale, N_q, N_k,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """dk and dv of the keys from n0; h and bh are of a key head, and num_heads counts query heads.

    Keys beyond N_k give rows that are not stored, so they need no mask.
    """
    sc = scale * _LOG2_E
    k = _load(k_, k_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, True)
    v = _load(v_, v_strides, b, h, n0, N_k, BN, D, D_PAD, MOVE, True)
    dk = tl.zeros([BN, D_PAD], tl.float32)
    dv = tl.zeros([BN, D_PAD], tl.float32)
    limit = n0
    begin, full, inner, end = _query_ranges(n0, b, band, N_q, BM, BN, CAUSAL, BAND)
    if BAND != "none":
        limit = _after_query(n0 + tl.arange(0, BN), b, band, N_q, BAND)
    for g in tl.range(0, G, disable_licm=True):  # addresses computed before the loop would not fit the registers
        query_h, query_bh = _query_head(h, g, G), _query_head(bh, g, G)
        if CAUSAL:
            dk, dv = _dkv_queries(
                dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, query_h, query_bh,
                num_heads, n0, begin, full, limit, sc, N_q, BM, BN, D, D_PAD, BAND, True, MOVE, PRECISION, ALONE,
            )  # fmt: skip
        dk, dv = _dkv_queries(
            dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, query_h, query_bh,
            num_heads, n0, full, inner, limit, sc, N_q, BM, BN, D, D_PAD, BAND, False, MOVE, PRECISION, ALONE,
        )  # fmt: skip
        if BAND != "none":
            dk, dv = _dkv_queries(
                dk, dv, k, v, q_, o_, do_, L, VECTORS, q_strides, o_strides, do_strides, b, query_h, query_bh,
                num_heads, n0, inner, end, limit, sc, N_q, BM, BN, D, D_PAD, BAND, True, MOVE, PRECISION, ALONE,
            )  # fmt: skip
    _store(dk_, dk_strides, (dk * scale).to(k.dtype), b, h, n0, N_k, BN, D, D_PAD, MOVE)
    _store(dv_, dv_strides, dv.to(k.dtype), b, h, n0, N_k, BN, D, D_PAD, MOVE)


@triton.jit(do_not_specialize=_LENGTHS)
def dkv_kernel(
    q_, k_, v_, do_, dk_, dv_, VECTORS, DOCUMENT_ENDS,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, scale, H, N_q, N_k, WINDOW, HEADS,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dk and dv, with the VECTORS that `dq_kernel` has left."""
    num_blocks = tl.cdiv(N_k, BN)
    block, bh = _program(num_blocks, HEADS)
    key_heads = H // G
    _dkv_tile(
        q_, k_, v_, do_, do_, dk_, dv_, VECTORS, VECTORS,  # o and L are not used
        q_strides, k_strides, v_strides, do_strides, do_strides, dk_strides, dv_strides,
        bh // key_heads, bh % key_heads, bh, tl.num_programs(0) // num_blocks * G, block * BN,
        (DOCUMENT_ENDS, DOCUMENT_ENDS, WINDOW), scale, N_q, N_k,
        BM, BN, D, D_PAD, G, CAUSAL, BAND, MOVE, PRECISION, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=_LENGTHS)
def backward_kernel(
    q_, k_, v_, o_, do_, dq_, dk_, dv_, L, DOCUMENT_STARTS, DOCUMENT_ENDS,
    q_strides, k_strides, v_strides, o_strides, do_strides, dq_strides, dk_strides, dv_strides,
    scale, H, N_q, N_k, WINDOW, HEADS,
    BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, MOVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv in one launch, for work shorter than a launch. The loops over queries compute delta themselves."""
    num_key_blocks, num_query_blocks = tl.cdiv(N_k, BN), tl.cdiv(N_q, BM)
    num_blocks = num_key_blocks + num_query_blocks * G  # of a key head and its query heads
    num_key_heads = tl.num_programs(0) // num_blocks
    block, bh = tl.program_id(0) // num_key_heads, tl.program_id(0) % num_key_heads
    key_heads = H // G
    b, h = bh // key_heads, bh % key_heads
    band = (DOCUMENT_STARTS, DOCUMENT_ENDS, WINDOW)
    if block < num_key_blocks:
        _dkv_tile(
            q_, k_, v_, o_, do_, dk_, dv_, L, L,
            q_strides, k_strides, v_strides, o_strides, do_strides, dk_strides, dv_strides,
            b, h, bh, num_key_heads * G, block * BN, band, scale, N_q, N_k,
            BM, BN, D, D_PAD, G, CAUSAL, BAND, MOVE, PRECISION, True,
        )  # fmt: skip
    else:
        left = num_blocks - 1 - block
        h, bh = _query_head(h, left % G, G), _query_head(bh, left % G, G)
        m0 = left // G * BM
        do, lse2, delta = _row_statistics(o_, do_, L, o_strides, do_strides, b, h, bh, m0, N_q, BM, D, D_PAD, MOVE)
        _dq_tile(
            q_, k_, v_, dq_, do, lse2, delta, q_strides, k_strides, v_strides, dq_strides, b, h, m0, band,
            scale, N_q, N_k, BM, BN, D, D_PAD, G, CAUSAL, BAND, MOVE, PRECISION, False,
        )  # fmt: skip
