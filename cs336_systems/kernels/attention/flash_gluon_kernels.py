"""The forward pass of `flash_triton` for Hopper in Gluon, as FlashAttention-3 has it (Shah et al. 2024, Algorithm 1).

Triton's compiler waits for a matrix product before it starts the exponentials. Here the kernel itself says what runs
beside what: one warp loads the tiles of keys and values, and each group of four warps (a warpgroup) walks along them
with 64 queries of its own. A warpgroup starts the product of the next keys, then that of the present values, and takes
the exponentials of the next scores while the second product runs.

Legend, beyond that of `flash_triton_kernels.py`
    GROUPS         warpgroups of 64 queries: a program's tile has 64 * GROUPS queries
    STAGES         tiles of keys, and of values, that fit in shared memory at a time
    PING_PONG      the warpgroups start their products in turn, so that one has its products while the others have their
                   exponentials
    step           tiles of keys since the program's start; tile `step` is in stage step % STAGES
    done           tiles of queries since the program's start
    round          step // STAGES: how often its stage was used before. A barrier alternates between two phases: its
                   n-th completion is waited for with phase n & 1, counted from 0, and the other phase does not wait the
                   first time
    ready          barriers that complete when the copy engine has filled a stage
    empty          barriers that complete when all warpgroups have read it
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

# Triton 3.6 has the second name of each, 3.9 the first.
_copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

ROWS = 64
"""Queries of a warpgroup: what one matrix instruction takes."""
_ROWS = gl.constexpr(ROWS)
_LN_2 = gl.constexpr(math.log(2))
_LOG2_E = gl.constexpr(math.log2(math.e))
_LENGTHS = ["H", "N_q", "N_k", "HEADS_TOGETHER", "num_tiles"]


@gluon.jit
def _place(
    tile, num_blocks, num_tiles, H, HEADS_TOGETHER, N_k, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr
):
    """The b, h and first query of a tile, and how many tiles of keys it sees.

    Heads come in groups whose keys and values fit the L2 cache together, and in a group the longest tiles come first.
    """
    first = tile // (num_blocks * HEADS_TOGETHER) * HEADS_TOGETHER
    size = gl.minimum(HEADS_TOGETHER, num_tiles // num_blocks - first)
    within = tile - first * num_blocks
    bh = first + within % size
    m0 = (num_blocks - 1 - within // size) * BM
    end = N_k
    if CAUSAL:
        end = gl.minimum(m0 + BM, N_k)
    return bh // H, bh % H, m0, gl.cdiv(end, BN)


@gluon.jit
def _load(desc, b, h, row, buffers, ready, stage):
    """Has the copy engine fill a stage with the rows from `row`: zero beyond the tensor."""
    bar = ready.index(stage)
    mbarrier.expect(bar, desc.block_type.nbytes)
    buffer = buffers.index(stage).reshape(desc.block_type.shape)
    _copy_in(desc, [b, h, row, 0], bar, buffer)


@gluon.jit
def _load_next(desc, b, h, row, buffers, ready, empty, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    _load(desc, b, h, row, buffers, ready, stage)


@gluon.jit
def _producer(work, BN: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Loads what the warpgroups read, in the order in which they read it: the last keys of a tile come first."""
    descs, buffers, barriers, _, _, problem = work
    H, N_q, N_k, HEADS_TOGETHER, num_tiles = problem
    q_desc, k_desc, v_desc, _ = descs
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = barriers
    BM: gl.constexpr = _ROWS * GROUPS
    num_blocks = gl.cdiv(N_q, BM)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        done = tile // gl.num_programs(0)
        b, h, m0, count = _place(tile, num_blocks, num_tiles, H, HEADS_TOGETHER, N_k, BM, BN, CAUSAL)
        for group in gl.static_range(GROUPS):
            mbarrier.wait(q_empty.index(group), (done & 1) ^ 1)
            _load(q_desc, b, h, m0 + group * _ROWS, q_buffers, q_ready, group)
        _load_next(k_desc, b, h, (count - 1) * BN, k_buffers, k_ready, k_empty, step, STAGES)
        for j in range(count - 2, -1, -1):
            _load_next(k_desc, b, h, j * BN, k_buffers, k_ready, k_empty, step + 1, STAGES)
            _load_next(v_desc, b, h, (j + 1) * BN, v_buffers, v_ready, v_empty, step, STAGES)
            step += 1
        _load_next(v_desc, b, h, 0, v_buffers, v_ready, v_empty, step, STAGES)
        step += 1


@gluon.jit
def _start_scores(q, k_buffers, k_ready, step, S: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Starts q k^T for the keys of a step, when they have come."""
    stage = step % STAGES
    mbarrier.wait(k_ready.index(stage), step // STAGES & 1)
    k = k_buffers.index(stage)
    zeros = gl.zeros([_ROWS, BN], gl.float32, S)
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_output(p, acc, v_buffers, v_ready, step, STAGES: gl.constexpr):
    """Starts acc + p v for the values of a step, when they have come."""
    stage = step % STAGES
    mbarrier.wait(v_ready.index(stage), step // STAGES & 1)
    return warpgroup_mma(p, v_buffers.index(stage), acc, is_async=True)


@gluon.jit
def _softmax(s, total, m, first_row, n0, sc, N_k, S: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    """One step of the online softmax: the probabilities, what the output so far is to be multiplied by, total, m."""
    if MASKED:
        rows = first_row + gl.arange(0, s.shape[0], gl.SliceLayout(1, S))
        columns = n0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        visible = (columns < N_k)[None, :]
        if CAUSAL:
            visible = visible & (rows[:, None] >= columns[None, :])
        s = gl.where(visible, s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * sc)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # no score so far was above it: -inf - -inf is no number
    p = gl.exp2(s * sc - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, alpha, total * alpha + gl.sum(p, 1), m_new


@gluon.jit
def _walk(
    q, p, acc, total, m, k_buffers, v_buffers, barriers, step, done, lo, hi, first_row, sc, N_k,
    BN: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """The tiles of keys below hi, down to lo. p has the probabilities of the tile before, not yet multiplied with v."""
    q_ready, _, k_ready, k_empty, v_ready, v_empty, turns = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    FIRST: gl.constexpr = 1 if GROUP == 0 else 0  # which does not wait for its first turn
    dtype: gl.constexpr = p.dtype
    for j in range(hi - 1, lo - 1, -1):
        if PING_PONG:
            mbarrier.wait(turns.index(GROUP), ((step - done) & 1) ^ FIRST)  # the last step of a tile has no turn
        scores = _start_scores(q, k_buffers, k_ready, step + 1, S, BN, STAGES)
        output = _start_output(p, acc, v_buffers, v_ready, step, STAGES)
        if PING_PONG:
            mbarrier.arrive(turns.index((GROUP + 1) % GROUPS))
        s = warpgroup_mma_wait(1, [scores])
        p_next, alpha, total, m = _softmax(s, total, m, first_row, j * BN, sc, N_k, S, CAUSAL, MASKED)
        p_next = gl.convert_layout(p_next.to(dtype), P)
        # q has long come: this holds nothing up. But the assembler moves nothing across a wait for a barrier, and
        # without it would wait for the product before it takes the exponentials.
        mbarrier.wait(q_ready.index(GROUP), done & 1)
        acc, p = warpgroup_mma_wait(0, [output, p_next])
        mbarrier.arrive(k_empty.index((step + 1) % STAGES))
        mbarrier.arrive(v_empty.index(step % STAGES))
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        step += 1
    return p, acc, total, m, step


@gluon.jit
def _consumer(
    work, D: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """The warpgroup number GROUP: o and L of its 64 queries of each tile."""
    descs, buffers, barriers, L, scale, problem = work
    H, N_q, N_k, HEADS_TOGETHER, num_tiles = problem
    o_desc = descs[3]
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, _ = barriers
    BM: gl.constexpr = _ROWS * GROUPS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    dtype: gl.constexpr = o_desc.dtype
    sc = scale * _LOG2_E
    num_blocks = gl.cdiv(N_q, BM)
    q = q_buffers.index(GROUP)
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        done = tile // gl.num_programs(0)
        b, h, m0, count = _place(tile, num_blocks, num_tiles, H, HEADS_TOGETHER, N_k, BM, BN, CAUSAL)
        first_row = m0 + GROUP * _ROWS
        full = count - 1  # tiles of keys that need no mask; the last one is always masked
        if CAUSAL:
            full = gl.minimum(first_row // BN, full)
        mbarrier.wait(q_ready.index(GROUP), done & 1)
        scores = _start_scores(q, k_buffers, k_ready, step, S, BN, STAGES)
        s = warpgroup_mma_wait(0, [scores])
        mbarrier.arrive(k_empty.index(step % STAGES))
        acc = gl.zeros([_ROWS, D], gl.float32, OUT)
        total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S))
        m = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        p, _alpha, total, m = _softmax(s, total, m, first_row, (count - 1) * BN, sc, N_k, S, CAUSAL, True)
        p = gl.convert_layout(p.to(dtype), P)
        p, acc, total, m, step = _walk(
            q, p, acc, total, m, k_buffers, v_buffers, barriers, step, done, full, count - 1, first_row, sc, N_k,
            BN, GROUP, GROUPS, STAGES, CAUSAL, True, PING_PONG,
        )  # fmt: skip
        p, acc, total, m, step = _walk(
            q, p, acc, total, m, k_buffers, v_buffers, barriers, step, done, 0, full, first_row, sc, N_k,
            BN, GROUP, GROUPS, STAGES, CAUSAL, False, PING_PONG,
        )  # fmt: skip
        output = _start_output(p, acc, v_buffers, v_ready, step, STAGES)
        acc = warpgroup_mma_wait(0, [output])
        mbarrier.arrive(v_empty.index(step % STAGES))
        rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, S))
        L_rows = L + (b * H + h).to(gl.int64) * N_q + rows
        gl.store(L_rows, (m + gl.log2(total)) * _LN_2, mask=rows < N_q)
        # o goes out through the place of q. The copy engine leaves out what is beyond the tensor.
        o = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
        q.store(o.to(dtype))
        fence_async_shared()
        _copy_out(o_desc, [b, h, first_row, 0], q.reshape(o_desc.block_type.shape))
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(GROUP))
        step += 1


@gluon.jit
def _barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit(do_not_specialize=_LENGTHS)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, L, scale, H, N_q, N_k, HEADS_TOGETHER, num_tiles,
    BN: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """o and L of the tiles of queries program_id, program_id + num_programs, ... below num_tiles."""
    dtype: gl.constexpr = q_desc.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buffers = gl.allocate_shared_memory(dtype, [GROUPS, _ROWS, D], shared)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, BN, D], shared)
    v_buffers = gl.allocate_shared_memory(dtype, [STAGES, BN, D], shared)
    q_ready, q_empty = _barriers(GROUPS, 1), _barriers(GROUPS, 1)
    k_ready, k_empty = _barriers(STAGES, 1), _barriers(STAGES, GROUPS)
    v_ready, v_empty = _barriers(STAGES, 1), _barriers(STAGES, GROUPS)
    turns = _barriers(GROUPS, 1)
    fence_async_shared()
    descs = (q_desc, k_desc, v_desc, o_desc)
    buffers = (q_buffers, k_buffers, v_buffers)
    barriers = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty, turns)
    problem = (H, N_q, N_k, HEADS_TOGETHER, num_tiles)
    work = (descs, buffers, barriers, L, scale, problem)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_consumer, (work, D, BN, 0, GROUPS, STAGES, CAUSAL, PING_PONG)),
                (_consumer, (work, D, BN, 1, GROUPS, STAGES, CAUSAL, PING_PONG)),
                (_producer, (work, BN, GROUPS, STAGES, CAUSAL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_consumer, (work, D, BN, 0, GROUPS, STAGES, CAUSAL, PING_PONG)),
                (_consumer, (work, D, BN, 1, GROUPS, STAGES, CAUSAL, PING_PONG)),
                (_consumer, (work, D, BN, 2, GROUPS, STAGES, CAUSAL, PING_PONG)),
                (_producer, (work, BN, GROUPS, STAGES, CAUSAL)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
