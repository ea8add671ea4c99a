"""The forward pass of `flash_triton` for Hopper in Gluon, as in FlashAttention-3 (Shah et al. 2024).

Triton's compiler waits for a matrix product before it starts the exponentials. Here the kernel itself overlaps them:
one warp loads the tiles of keys and values, and each of two or three groups of four warps (a warpgroup) loops over them
with 64 queries of its own. A warpgroup starts the product with the next keys, then the product with the present values,
and computes the exponentials of the next scores beside a product: its own or another warpgroup's.

The last tile of keys comes first. For the tile of keys j, S(j) = q k^T and P(j) = exp2(S(j) - m). One warpgroup over
time, where a product runs beside what stands above or below it:

    products         S(j)      P(j+1) v ...........     S(j-1)      P(j) v ............
    exponentials               P(j) ...............                 P(j-1) ............

The other warpgroups do the same with their own queries, so the matrix units have work while one of them waits.

With TURNS, a warpgroup starts both products, passes the turn on, and waits for both. Two warpgroups over time:

    warpgroup 0      S(j)  P(j+1) v      P(j) ............    S(j-1)  P(j) v      P(j-1) ...
    warpgroup 1      P(j+1) .......      S(j)  P(j+1) v       P(j) ..........     S(j-1)  P(j) v

Scores, probabilities and the output stay in registers; q, k and v are read from shared memory.

The legend of the names is in `flash_gluon_common.py`. A program's tiles have queries, those of its inner loop keys.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .flash_gluon_common import (
    LENGTHS,
    LOG2_E,
    REGISTERS,
    REGISTERS_OF_THREE,
    ROWS,
    STAGES,
    apart,
    arrive,
    arrive_and_wait,
    barriers,
    first_key,
    key_head,
    load_tile,
    next_tile,
    place,
    release,
    stage_of,
    store_tile,
    take_tile,
    wait_ready,
    wait_released,
)

BN = 128
_ROWS, _BN = gl.constexpr(ROWS), gl.constexpr(BN)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
"""How the threads of a warpgroup divide a tile of scores."""
_ROW, _COLUMN = gl.constexpr(gl.SliceLayout(1, _SCORES.value)), gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, 8]
    )
)
"""How a warpgroup divides sums of every eighth column of _SCORES: each thread has those of its own columns."""
_K_READ, _V_READ, _TURN = gl.constexpr(6), gl.constexpr(8), gl.constexpr(10)
"""The first of two named barriers each: for the stages of K, for those of V, and for the turns of the warpgroups."""
_LN_2 = gl.constexpr(math.log(2))


def groups(d_pad: int, has_band: bool) -> int:
    """GROUPS: as many as there are registers for, since all warpgroups share each load of keys and values.

    With a band's mask there are too few for three. A tile of fewer queries also loads fewer keys that only some of them
    see.
    """
    return 3 if d_pad == 64 and not has_band else 2


@gluon.jit
def _place(tile, H, N_q, TILES, HEADS, GROUPS: gl.constexpr):
    """b, h, bh and the first query of a tile."""
    num_blocks = gl.cdiv(N_q, GROUPS * _ROWS)
    block, b, h, bh = place(tile, TILES, num_blocks, H, HEADS)
    return b, h, bh, (num_blocks - 1 - block) * GROUPS * _ROWS


@gluon.jit
def _seen(m0, rows: gl.constexpr, b, N_k, band, CAUSAL: gl.constexpr, BAND: gl.constexpr):
    """The tiles of keys that the `rows` queries from m0 see, from `begin` to `end`.

    If `rows` is 64, which divides BN, each query sees all keys of the tiles from `inner` to the last but one.
    """
    keys = N_k
    if CAUSAL:
        keys = gl.minimum(m0 + rows, N_k)
    end = gl.cdiv(keys, _BN)
    begin, inner = 0, 0
    if BAND != "none":
        begin = first_key(m0, b, band, N_k, BAND) // _BN
        inner = gl.minimum(gl.cdiv(first_key(m0 + rows - 1, b, band, N_k, BAND), _BN), end - 1)
    return begin, inner, end


@gluon.jit
def _load_next(desc, b, h, row, buffers, ready, read: gl.constexpr, step, GROUPS: gl.constexpr):
    """Have TMA fill the stage of a step, as soon as the stage has been read."""
    wait_released(read, step, GROUPS)
    bar = ready.index(stage_of(step))
    mbarrier.expect(bar, desc.block_type.nbytes)
    load_tile(desc, b, h, row, buffers.index(stage_of(step)), bar)


@gluon.jit
def _producer(work, GROUPS: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr):
    """Load the tiles in the order in which the warpgroups read them: the last keys come first."""
    descs, buffers, bars, _, COUNTER, _, H, N_q, N_k, band, TILES, HEADS = work
    q_, k_, v_, _ = descs
    q_buffers, k_buffers, v_buffers, _, tiles = buffers
    tile_ready, q_ready, q_empty, k_ready, v_ready = bars
    tile, i, start = gl.program_id(0), 0, 0
    while tile < TILES:
        b, h, _bh, m0 = _place(tile, H, N_q, TILES, HEADS, GROUPS)
        begin, _inner, end = _seen(m0, GROUPS * _ROWS, b, N_k, band, CAUSAL, BAND)
        kv_head = key_head(h, G)
        _load_next(k_, b, kv_head, (end - 1) * _BN, k_buffers, k_ready, _K_READ, start, GROUPS)
        for group in gl.static_range(GROUPS - 1, -1, -1):  # causal: the last one sees the keys that come first
            mbarrier.wait(q_empty.index(group), i & 1 ^ 1)
            bar = q_ready.index(group)
            mbarrier.expect(bar, q_.block_type.nbytes)
            load_tile(q_, b, h, m0 + group * _ROWS, q_buffers.index(group), bar)
        for j in range(end - 1, begin, -1):
            step = start + end - 1 - j
            _load_next(k_, b, kv_head, (j - 1) * _BN, k_buffers, k_ready, _K_READ, step + 1, GROUPS)
            _load_next(v_, b, kv_head, j * _BN, v_buffers, v_ready, _V_READ, step, GROUPS)
        start += end - begin
        _load_next(v_, b, kv_head, begin * _BN, v_buffers, v_ready, _V_READ, start - 1, GROUPS)
        tile = take_tile(COUNTER, tiles, tile_ready, i)
        i += 1


@gluon.jit
def _start_scores(q, k_buffers, k_ready, step):
    """Start q k^T for the keys of a step, when they have come."""
    wait_ready(k_ready, step)
    k = k_buffers.index(stage_of(step))
    zeros = gl.zeros([_ROWS, _BN], gl.float32, _SCORES)
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_output(p, acc, v_buffers, v_ready, step):
    """Start acc + p v for the values of a step, when they have come."""
    wait_ready(v_ready, step)
    return warpgroup_mma(p, v_buffers.index(stage_of(step)), acc, is_async=True)


@gluon.jit
def _pass_over(bars, lo, hi, GROUPS: gl.constexpr):
    """The steps from lo to hi, whose keys only other warpgroups see: free the stages."""
    _, _, _, k_ready, v_ready = bars
    for step in range(lo, hi):
        wait_ready(k_ready, step)
        release(_K_READ, step, GROUPS)
        wait_ready(v_ready, step)
        release(_V_READ, step, GROUPS)


@gluon.jit
def _softmax(
    s, total, m, first_row, n0, limit, sc, N_k, CAUSAL: gl.constexpr, BAND: gl.constexpr, IS_LAST: gl.constexpr
):
    """One step of the online softmax: the probabilities, the factor of the output so far, total and m.

    IS_LAST: the tile is the last that the warpgroup sees, so its mask has the causal limit and the end of the keys. The
    band's mask is apart, since one condition of both needs more registers.
    """
    column, offset = apart(gl.arange(0, _BN, _COLUMN)[None, :])
    if IS_LAST:
        seen = column < N_k - n0 - offset
        if CAUSAL:
            rows = first_row + gl.arange(0, _ROWS, _ROW)
            seen = column <= (gl.minimum(rows, N_k - 1) - n0)[:, None] - offset
        s = gl.where(seen, s, float("-inf"))
    if BAND != "none":
        s = gl.where(column >= (limit - n0)[:, None] - offset, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * sc)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # no score so far is above -inf; -inf - -inf is NaN
    p = gl.exp2(s * sc - shift[:, None])
    alpha = gl.exp2(m - shift)
    # Each thread adds up its own columns. The four threads of a row meet after the last tile.
    sums = gl.convert_layout(gl.sum(p.reshape([_ROWS, _BN // 8, 8]), 1), _SUMS)
    return p, alpha, total * gl.convert_layout(alpha, gl.SliceLayout(1, _SUMS))[:, None] + sums, m_new


@gluon.jit
def _loop(
    q, p, acc, total, m, buffers, bars, group: gl.constexpr, i, base, lo, hi, first_row, limit, sc, N_k,
    OUTPUT: gl.constexpr, GROUPS: gl.constexpr, BAND: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The tiles of keys from lo to hi, the last one first. Tile j has step base - 1 - j, and needs no causal mask.

    BAND is "none" if each query sees all keys of these tiles. p has the probabilities of tile j + 1, not yet multiplied
    with v.
    """
    _, k_buffers, v_buffers, _, _ = buffers
    _, q_ready, _, k_ready, v_ready = bars
    for j in range(hi - 1, lo - 1, -1):
        step = base - 2 - j  # of tile j + 1
        if TURNS:
            arrive_and_wait(_TURN + group, 256)
        scores = _start_scores(q, k_buffers, k_ready, step + 1)
        output = _start_output(p, acc, v_buffers, v_ready, step)
        if TURNS:
            arrive(_TURN + 1 - group, 256)
        s = warpgroup_mma_wait(1, [scores])
        if TURNS:
            release(_K_READ, step + 1, GROUPS)
            acc = warpgroup_mma_wait(0, [output])
            release(_V_READ, step, GROUPS)
        p_next, alpha, total, m = _softmax(s, total, m, first_row, j * _BN, limit, sc, N_k, False, BAND, False)
        if not TURNS:
            if GROUPS == 2:  # three warpgroups have no registers for two tiles of probabilities
                p_next = gl.convert_layout(p_next.to(p.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
            # q arrived long ago, so this wait returns at once. But the assembler moves nothing across a wait for a
            # barrier. Without this wait it would wait for the product before it computes the exponentials.
            mbarrier.wait(q_ready.index(group), i & 1)
            acc, p_next = warpgroup_mma_wait(0, [output, p_next])
            release(_K_READ, step + 1, GROUPS)
            release(_V_READ, step, GROUPS)
        p = gl.convert_layout(p_next.to(p.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
    return p, acc, total, m


@gluon.jit
def _consumer(
    work, group: gl.constexpr, D_PAD: gl.constexpr, GROUPS: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr
):
    """One warpgroup: o and L of its queries.

    The queries may see only some keys of the last tile and, where there is a band, of the first ones: these are masked.
    """
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    # Turns are no faster at head size 64, and slower with a window (docs/log.md). A warpgroup takes one for each tile
    # of keys that it sees, but the last. So both must see the same tiles. Without a band they do, because a program's
    # 128 queries begin at a multiple of BN.
    TURNS: gl.constexpr = D_PAD == 128 and BAND == "none"
    descs, buffers, bars, L, _, scale, H, N_q, N_k, band, TILES, HEADS = work
    o_ = descs[3]
    q_buffers, k_buffers, v_buffers, o_buffers, tiles = buffers
    tile_ready, q_ready, q_empty, k_ready, v_ready = bars
    sc = scale * LOG2_E
    q, o_buffer = q_buffers.index(group), o_buffers.index(group)
    if TURNS and group == 1:
        arrive(_TURN, 256)  # the first turn; the last one that it passes is not taken
    tile, i, start = gl.program_id(0), 0, 0
    while tile < TILES:
        b, h, bh, m0 = _place(tile, H, N_q, TILES, HEADS, GROUPS)
        first_row = m0 + group * _ROWS
        tile_begin, _inner, tile_end = _seen(m0, GROUPS * _ROWS, b, N_k, band, CAUSAL, BAND)
        begin, inner, end = _seen(first_row, _ROWS, b, N_k, band, CAUSAL, BAND)
        if GROUPS == 3:  # a warpgroup whose queries are beyond the last one need not see more than a tile of keys
            end = gl.where(first_row < N_q, end, 1)
        limit = first_row
        if BAND != "none":
            limit = first_key(first_row + gl.arange(0, _ROWS, _ROW), b, band, N_k, BAND)
        base = start + tile_end  # tile j of the keys has step base - 1 - j
        _pass_over(bars, start, base - end, GROUPS)
        start = base - end
        mbarrier.wait(q_ready.index(group), i & 1)
        scores = _start_scores(q, k_buffers, k_ready, start)
        s = warpgroup_mma_wait(0, [scores])
        release(_K_READ, start, GROUPS)
        acc = gl.zeros([_ROWS, D_PAD], gl.float32, OUTPUT)
        total = gl.zeros([_ROWS, 8], gl.float32, _SUMS)
        m = gl.full([_ROWS], float("-inf"), gl.float32, _ROW)
        p, _alpha, total, m = _softmax(s, total, m, first_row, (end - 1) * _BN, limit, sc, N_k, CAUSAL, BAND, True)
        p = gl.convert_layout(p.to(o_.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        p, acc, total, m = _loop(
            q, p, acc, total, m, buffers, bars, group, i, base, inner, end - 1, first_row, limit, sc, N_k,
            OUTPUT, GROUPS, "none", TURNS,
        )  # fmt: skip
        if BAND != "none":
            p, acc, total, m = _loop(
                q, p, acc, total, m, buffers, bars, group, i, base, begin, inner, first_row, limit, sc, N_k,
                OUTPUT, GROUPS, BAND, TURNS,
            )  # fmt: skip
        start = base - begin
        mbarrier.arrive(q_empty.index(group))
        output = _start_output(p, acc, v_buffers, v_ready, start - 1)
        acc = warpgroup_mma_wait(0, [output])
        release(_V_READ, start - 1, GROUPS)
        _pass_over(bars, start, base - tile_begin, GROUPS)
        start = base - tile_begin
        total = gl.convert_layout(gl.sum(total, 1), _ROW)
        rows = first_row + gl.arange(0, _ROWS, _ROW)
        gl.store(L + bh.to(gl.int64) * N_q + rows, (m + gl.log2(total)) * _LN_2, mask=rows < N_q)
        o = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, OUTPUT))[:, None]
        tma.store_wait(0)  # the tile before has left the buffer
        store_tile(o_, b, h, first_row, o, o_buffer)
        tile = next_tile(tiles, tile_ready, i)
        i += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_, k_, v_, o_, L, COUNTER, DOCUMENT_STARTS, scale, H, N_q, N_k, WINDOW, TILES, HEADS,
    D_PAD: gl.constexpr, GROUPS: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """o and L of this program's tiles of queries."""
    dtype: gl.constexpr = q_.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buffers = gl.allocate_shared_memory(dtype, [GROUPS, _ROWS, D_PAD], shared)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, _BN, D_PAD], shared)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, _BN, D_PAD], shared)
    o_buffers = gl.allocate_shared_memory(dtype, [GROUPS, _ROWS, D_PAD], shared)
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 32], gl.NVMMASharedLayout(0, 32, 1))
    tile_ready = barriers(STAGES, 1)
    q_ready, q_empty = barriers(GROUPS, 1), barriers(GROUPS, 1)
    k_ready, v_ready = barriers(STAGES, 1), barriers(STAGES, 1)
    fence_async_shared()
    descs = (q_, k_, v_, o_)
    buffers = (q_buffers, k_buffers, v_buffers, o_buffers, tiles)
    bars = (tile_ready, q_ready, q_empty, k_ready, v_ready)
    band = (DOCUMENT_STARTS, DOCUMENT_STARTS, WINDOW)  # the ends are not used
    work = (descs, buffers, bars, L, COUNTER, scale, H, N_q, N_k, band, TILES, HEADS)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (_consumer, (work, 0, D_PAD, GROUPS, CAUSAL, BAND)),
                (_consumer, (work, 1, D_PAD, GROUPS, CAUSAL, BAND)),
                (_consumer, (work, 2, D_PAD, GROUPS, CAUSAL, BAND)),
                (_producer, (work, GROUPS, G, CAUSAL, BAND)),
            ],
            [4, 4, 1],
            REGISTERS_OF_THREE,
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (work, 0, D_PAD, GROUPS, CAUSAL, BAND)),
                (_consumer, (work, 1, D_PAD, GROUPS, CAUSAL, BAND)),
                (_producer, (work, GROUPS, G, CAUSAL, BAND)),
            ],
            [4, 1],
            REGISTERS,
        )
