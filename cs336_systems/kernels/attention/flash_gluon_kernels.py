"""The forward pass of `flash_triton` for Hopper in Gluon, as in FlashAttention-3 (Shah et al. 2024).

Triton's compiler waits for a matrix product before it starts the exponentials. Here the kernel itself overlaps them:
one warp loads the tiles of keys and values, and each of two groups of four warps (a warpgroup) loops over them with 64
queries of its own. A warpgroup starts the product with the next keys, then the product with the present values, and
computes the exponentials of the next scores while the second product runs.

The warpgroups take turns to start their products (FlashAttention-3's ping-pong): the products of one run while the
other computes its exponentials.

The legend of the names is in `flash_gluon_common.py`.
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
    BLOCK,
    GROUPS,
    LENGTHS,
    LOG2_E,
    REGISTERS,
    ROWS,
    STAGES,
    barriers,
    load_tile,
    place,
    store_tile,
    wait_empty,
    wait_ready,
)

BN = 128
_ROWS, _GROUPS, _BN = gl.constexpr(ROWS), gl.constexpr(GROUPS), gl.constexpr(BN)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
"""How the threads of a warpgroup divide a tile of scores."""
_ROW, _COLUMN = gl.constexpr(gl.SliceLayout(1, _SCORES.value)), gl.constexpr(gl.SliceLayout(0, _SCORES.value))
_LN_2 = gl.constexpr(math.log(2))


@gluon.jit
def _place(H, N_q, N_k, GROUP, CAUSAL: gl.constexpr):
    """This program's b, h, bh and first query, and the number of tiles of keys that it sees."""
    num_blocks = gl.cdiv(N_q, BLOCK)
    block, b, h, bh = place(num_blocks, H, GROUP)
    m0 = (num_blocks - 1 - block) * BLOCK
    end = N_k
    if CAUSAL:
        end = gl.minimum(m0 + BLOCK, N_k)
    return b, h, bh, m0, gl.cdiv(end, _BN)


@gluon.jit
def _load_next(desc, b, h, row, buffers, ready, empty, step):
    """Have TMA fill the stage of a step, as soon as the stage has been read."""
    wait_empty(empty, step)
    bar = ready.index(step % STAGES)
    mbarrier.expect(bar, desc.block_type.nbytes)
    load_tile(desc, b, h, row, buffers.index(step % STAGES), bar)


@gluon.jit
def _producer(work, D_PAD: gl.constexpr, CAUSAL: gl.constexpr):
    """Load the tiles in the order in which the warpgroups read them: the last keys come first."""
    descs, buffers, bars, _, _, H, N_q, N_k, GROUP = work
    q_, k_, v_, _ = descs
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty, _ = bars
    b, h, _bh, m0, count = _place(H, N_q, N_k, GROUP, CAUSAL)
    for group in gl.static_range(_GROUPS):
        bar = q_ready.index(group)
        mbarrier.expect(bar, q_.block_type.nbytes)
        load_tile(q_, b, h, m0 + group * _ROWS, q_buffers.index(group), bar)
    _load_next(k_, b, h, (count - 1) * _BN, k_buffers, k_ready, k_empty, 0)
    for step in range(count - 1):
        j = count - 2 - step
        _load_next(k_, b, h, j * _BN, k_buffers, k_ready, k_empty, step + 1)
        _load_next(v_, b, h, (j + 1) * _BN, v_buffers, v_ready, v_empty, step)
    _load_next(v_, b, h, 0, v_buffers, v_ready, v_empty, count - 1)


@gluon.jit
def _start_scores(q, k_buffers, k_ready, step):
    """Start q k^T for the keys of a step, when they have come."""
    wait_ready(k_ready, step)
    k = k_buffers.index(step % STAGES)
    zeros = gl.zeros([_ROWS, _BN], gl.float32, _SCORES)
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_output(p, acc, v_buffers, v_ready, step):
    """Start acc + p v for the values of a step, when they have come."""
    wait_ready(v_ready, step)
    return warpgroup_mma(p, v_buffers.index(step % STAGES), acc, is_async=True)


@gluon.jit
def _softmax(s, total, m, first_row, n0, sc, N_k, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """One step of the online softmax: the probabilities, the factor of the output so far, total and m."""
    if MASKED:
        columns = n0 + gl.arange(0, _BN, _COLUMN)
        seen = (columns < N_k)[None, :]
        if CAUSAL:
            rows = first_row + gl.arange(0, _ROWS, _ROW)
            seen = seen & (rows[:, None] >= columns[None, :])
        s = gl.where(seen, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * sc)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # no score so far is above -inf; -inf - -inf is NaN
    p = gl.exp2(s * sc - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, alpha, total * alpha + gl.sum(p, 1), m_new


@gluon.jit
def _loop(
    q, p, acc, total, m, buffers, bars, group: gl.constexpr, lo, hi, count, first_row, sc, N_k,
    OUTPUT: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The tiles of keys below hi, down to lo, of `count` in all.

    p has the probabilities of the tile before, not yet multiplied with v.
    """
    _, k_buffers, v_buffers = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty, turns = bars
    for j in range(hi - 1, lo - 1, -1):
        step = count - 2 - j
        mbarrier.wait(turns.index(group), step & 1 ^ 1 ^ group)  # the first turn is the first group's
        scores = _start_scores(q, k_buffers, k_ready, step + 1)
        output = _start_output(p, acc, v_buffers, v_ready, step)
        mbarrier.arrive(turns.index(1 - group))
        s = warpgroup_mma_wait(1, [scores])
        p_next, alpha, total, m = _softmax(s, total, m, first_row, j * _BN, sc, N_k, CAUSAL, MASKED)
        p_next = gl.convert_layout(p_next.to(p.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
        # q arrived long ago, so this wait returns at once. But the assembler moves nothing across a wait for a barrier,
        # and without it would wait for the product before it computes the exponentials.
        mbarrier.wait(q_ready.index(group), 0)
        acc, p = warpgroup_mma_wait(0, [output, p_next])
        mbarrier.arrive(k_empty.index((step + 1) % STAGES))
        mbarrier.arrive(v_empty.index(step % STAGES))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
    return p, acc, total, m


@gluon.jit
def _consumer(work, group: gl.constexpr, D_PAD: gl.constexpr, CAUSAL: gl.constexpr):
    """One warpgroup: o and L of its queries."""
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    descs, buffers, bars, L, scale, H, N_q, N_k, GROUP = work
    o_ = descs[3]
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, k_ready, k_empty, v_ready, _, _ = bars
    sc = scale * LOG2_E
    b, h, bh, m0, count = _place(H, N_q, N_k, GROUP, CAUSAL)
    first_row = m0 + group * _ROWS
    full = count - 1  # tiles of keys that need no mask; the last one is always masked
    if CAUSAL:
        full = gl.minimum(first_row // _BN, full)
    q = q_buffers.index(group)
    mbarrier.wait(q_ready.index(group), 0)
    scores = _start_scores(q, k_buffers, k_ready, 0)
    s = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_empty.index(0))
    acc = gl.zeros([_ROWS, D_PAD], gl.float32, OUTPUT)
    total = gl.zeros([_ROWS], gl.float32, _ROW)
    m = gl.full([_ROWS], float("-inf"), gl.float32, _ROW)
    p, _alpha, total, m = _softmax(s, total, m, first_row, (count - 1) * _BN, sc, N_k, CAUSAL, True)
    p = gl.convert_layout(p.to(o_.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    p, acc, total, m = _loop(
        q, p, acc, total, m, buffers, bars, group, full, count - 1, count, first_row, sc, N_k, OUTPUT, CAUSAL, True
    )
    p, acc, total, m = _loop(
        q, p, acc, total, m, buffers, bars, group, 0, full, count, first_row, sc, N_k, OUTPUT, CAUSAL, False
    )
    output = _start_output(p, acc, v_buffers, v_ready, count - 1)
    acc = warpgroup_mma_wait(0, [output])
    rows = first_row + gl.arange(0, _ROWS, _ROW)
    gl.store(L + bh.to(gl.int64) * N_q + rows, (m + gl.log2(total)) * _LN_2, mask=rows < N_q)
    o = acc / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None]
    store_tile(o_, b, h, first_row, o, q)  # nothing reads q's buffer any more
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def forward_kernel(q_, k_, v_, o_, L, scale, H, N_q, N_k, GROUP, D_PAD: gl.constexpr, CAUSAL: gl.constexpr):
    """One tile of queries: o and L."""
    dtype: gl.constexpr = q_.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, _ROWS, D_PAD], shared)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, _BN, D_PAD], shared)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, _BN, D_PAD], shared)
    q_ready = barriers(_GROUPS, 1)
    k_ready, k_empty = barriers(STAGES, 1), barriers(STAGES, _GROUPS)
    v_ready, v_empty = barriers(STAGES, 1), barriers(STAGES, _GROUPS)
    turns = barriers(_GROUPS, 1)
    fence_async_shared()
    descs = (q_, k_, v_, o_)
    buffers = (q_buffers, k_buffers, v_buffers)
    bars = (q_ready, k_ready, k_empty, v_ready, v_empty, turns)
    work = (descs, buffers, bars, L, scale, H, N_q, N_k, GROUP)
    gl.warp_specialize(
        [
            (_consumer, (work, 0, D_PAD, CAUSAL)),
            (_consumer, (work, 1, D_PAD, CAUSAL)),
            (_producer, (work, D_PAD, CAUSAL)),
        ],
        [4, 1],
        REGISTERS,
    )
