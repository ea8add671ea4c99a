"""The backward pass of `flash_triton` for Hopper in Gluon: a loop over keys for dQ, one over queries for dK and dV.

The two inner loops are the same as in `flash_triton_kernels.py`. The work is divided as in `flash_gluon_kernels.py`:
one warp loads, and each of two warpgroups has 64 rows of its own, queries in `dq_kernel` and keys in `dkv_kernel`. A
warpgroup starts a tile's scores and then its dP, and computes the exponentials while the second product runs.

In `dq_kernel` the product that gives dQ is delayed: it starts after the next tile's scores and dP, and overlaps with
that tile's exponentials. `dkv_kernel` keeps two sums and has no registers left for that: each tile ends with a wait for
its products.

The legend of the names is in `flash_gluon_common.py`.
"""

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
    D_PAD,
    GROUPS,
    LEFT,
    LENGTHS,
    LOG2_E,
    OUTPUT,
    ROWS,
    barriers,
    copy_in,
    load_next,
    load_tile,
    place,
    place_of_queries,
    store_tile,
    visible,
)

TILE = 64
"""Rows of a tile of the inner loop: keys in `dq_kernel`, queries in `dkv_kernel`."""
_DQ_STAGES, _DKV_STAGES = gl.constexpr(4), gl.constexpr(2)
_D_PAD, _ROWS, _GROUPS, _TILE = gl.constexpr(D_PAD), gl.constexpr(ROWS), gl.constexpr(GROUPS), gl.constexpr(TILE)
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16]))
_ROW, _COLUMN = (
    gl.constexpr(gl.SliceLayout(1, _SCORES.value)),
    gl.constexpr(gl.SliceLayout(0, _SCORES.value)),
)


@gluon.jit
def _start_products(a, c, x_buffers, y_buffers, x_ready, y_ready, step):
    """Start a x^T, then c y^T, for the x and y of a step, when they have come."""
    STAGES: gl.constexpr = x_buffers.shape[0]
    stage = step % STAGES
    phase = step // STAGES & 1
    zeros = gl.zeros([_ROWS, _TILE], gl.float32, _SCORES)
    mbarrier.wait(x_ready.index(stage), phase)
    first = warpgroup_mma(a, x_buffers.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(y_ready.index(stage), phase)
    second = warpgroup_mma(c, y_buffers.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    return first, second


# ---------------------------------------------------------------------------------------------------------------------
# dQ
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _dq_producer(work, CAUSAL: gl.constexpr):
    """Load the tiles in the order in which the warpgroups read them."""
    descs, buffers, bars, _, _, _, H, N_q, N_k, GROUP = work
    q_, k_, v_, o_, do_, _ = descs
    q_buffers, k_buffers, v_buffers, o_buffers, do_buffers = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty = bars
    b, h, _bh, m0, count = place_of_queries(H, N_q, N_k, GROUP, _TILE, CAUSAL)
    for group in gl.static_range(_GROUPS):
        bar = q_ready.index(group)
        row = m0 + group * _ROWS
        mbarrier.expect(bar, 3 * q_.block_type.nbytes)
        load_tile(do_, b, h, row, do_buffers, group, bar)
        load_tile(o_, b, h, row, o_buffers, group, bar)
        load_tile(q_, b, h, row, q_buffers, group, bar)
    for step in range(count):
        load_next(k_, b, h, step * _TILE, k_buffers, k_ready, k_empty, step)
        load_next(v_, b, h, step * _TILE, v_buffers, v_ready, v_empty, step)


@gluon.jit
def _dq_probabilities(s, lse2, first_row, n0, sc, N_k, CAUSAL: gl.constexpr, MASKED: gl.constexpr):
    p = gl.exp2(s * sc - lse2[:, None])
    if MASKED:  # after exp2, which may be infinite where a masked score is above the logsumexp
        p = gl.where(visible(p, first_row, n0, N_k, CAUSAL, _SCORES), p, 0.0)
    return p


@gluon.jit
def _dq_loop(
    q, do, ds, dq, lse2, delta, buffers, bars, group, lo, hi, first_row, sc, N_k,
    CAUSAL: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The tiles of keys from lo to hi. ds belongs to the tile before, and is not yet multiplied with its keys."""
    _, k_buffers, v_buffers, _, _ = buffers
    q_ready, k_ready, k_empty, v_ready, v_empty = bars
    for j in range(lo, hi):
        s, dp = _start_products(q, do, k_buffers, v_buffers, k_ready, v_ready, j)
        product = warpgroup_mma(ds, k_buffers.index((j - 1) % _DQ_STAGES), dq, is_async=True)
        s = warpgroup_mma_wait(2, [s])
        p = _dq_probabilities(s, lse2, first_row, j * _TILE, sc, N_k, CAUSAL, MASKED)
        # q arrived long ago, so these two waits return at once. But the assembler moves nothing across a wait for a
        # barrier. Without them it would wait for a product and only then compute the numbers that overlap with it.
        mbarrier.wait(q_ready.index(group), 0)
        dp, p = warpgroup_mma_wait(1, [dp, p])
        ds_next = gl.convert_layout((p * (dp - delta[:, None])).to(ds.dtype), LEFT)
        mbarrier.wait(q_ready.index(group), 0)
        dq, ds = warpgroup_mma_wait(0, [product, ds_next])
        mbarrier.arrive(k_empty.index((j - 1) % _DQ_STAGES))
        mbarrier.arrive(v_empty.index(j % _DQ_STAGES))
    return ds, dq


@gluon.jit
def _dq_consumer(work, group: gl.constexpr, CAUSAL: gl.constexpr):
    """One warpgroup: the VECTORS and dq of its queries."""
    descs, buffers, bars, L, VECTORS, scale, H, N_q, N_k, GROUP = work
    dq_ = descs[5]
    q_buffers, k_buffers, v_buffers, o_buffers, do_buffers = buffers
    q_ready, k_ready, _, v_ready, v_empty = bars
    sc = scale * LOG2_E
    b, h, bh, m0, count = place_of_queries(H, N_q, N_k, GROUP, _TILE, CAUSAL)
    first_row = m0 + group * _ROWS
    full = N_k // _TILE  # tiles of keys that need no mask; the first one is always masked
    if CAUSAL:
        full = gl.minimum(first_row // _TILE, full)
    rows = first_row + gl.arange(0, _ROWS, _ROW)
    lse2 = gl.load(L + bh.to(gl.int64) * N_q + rows, mask=rows < N_q, other=float("inf")) * LOG2_E
    q, do = q_buffers.index(group), do_buffers.index(group)
    mbarrier.wait(q_ready.index(group), 0)
    products = do.load(OUTPUT).to(gl.float32) * o_buffers.index(group).load(OUTPUT).to(gl.float32)
    delta = gl.convert_layout(gl.sum(products, 1), _ROW)
    num_blocks = gl.cdiv(N_q, BLOCK)
    N_PAD = num_blocks * BLOCK
    num_heads = gl.num_programs(0) // num_blocks
    vectors = VECTORS + bh.to(gl.int64) * N_PAD + rows
    gl.store(vectors, lse2)
    gl.store(vectors + num_heads.to(gl.int64) * N_PAD, delta)
    dq = gl.zeros([_ROWS, _D_PAD], gl.float32, OUTPUT)
    # With q in registers a product reads a third less from shared memory, which is as busy as the matrix units.
    q_held = q.load(gl.DotOperandLayout(0, _SCORES, 2))
    s, dp = _start_products(q_held, do, k_buffers, v_buffers, k_ready, v_ready, 0)
    s, dp = warpgroup_mma_wait(0, [s, dp])
    mbarrier.arrive(v_empty.index(0))
    p = _dq_probabilities(s, lse2, first_row, 0, sc, N_k, CAUSAL, True)
    ds = gl.convert_layout((p * (dp - delta[:, None])).to(dq_.dtype), LEFT)
    ds, dq = _dq_loop(q_held, do, ds, dq, lse2, delta, buffers, bars, group, 1, full, first_row, sc, N_k, CAUSAL, False)
    ds, dq = _dq_loop(
        q_held, do, ds, dq, lse2, delta, buffers, bars, group, gl.maximum(full, 1), count, first_row, sc, N_k,
        CAUSAL, True,
    )  # fmt: skip
    dq = warpgroup_mma(ds, k_buffers.index((count - 1) % _DQ_STAGES), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    store_tile(dq_, b, h, first_row, dq * scale, q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def dq_kernel(q_, k_, v_, o_, do_, dq_, L, VECTORS, scale, H, N_q, N_k, GROUP, CAUSAL: gl.constexpr):
    """One tile of queries: VECTORS for `dkv_kernel`, and dq."""
    dtype: gl.constexpr = q_.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, _ROWS, _D_PAD], shared)
    o_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, _ROWS, _D_PAD], shared)
    do_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, _ROWS, _D_PAD], shared)
    k_buffers = gl.allocate_shared_memory(dtype, [_DQ_STAGES, _TILE, _D_PAD], shared)
    v_buffers = gl.allocate_shared_memory(dtype, [_DQ_STAGES, _TILE, _D_PAD], shared)
    q_ready = barriers(_GROUPS, 1)
    k_ready, k_empty = barriers(_DQ_STAGES, 1), barriers(_DQ_STAGES, _GROUPS)
    v_ready, v_empty = barriers(_DQ_STAGES, 1), barriers(_DQ_STAGES, _GROUPS)
    fence_async_shared()
    descs = (q_, k_, v_, o_, do_, dq_)
    buffers = (q_buffers, k_buffers, v_buffers, o_buffers, do_buffers)
    bars = (q_ready, k_ready, k_empty, v_ready, v_empty)
    work = (descs, buffers, bars, L, VECTORS, scale, H, N_q, N_k, GROUP)
    gl.warp_specialize(
        [(_dq_consumer, (work, 0, CAUSAL)), (_dq_consumer, (work, 1, CAUSAL)), (_dq_producer, (work, CAUSAL))],
        [4, 1],
        [240, 24],
    )


# ---------------------------------------------------------------------------------------------------------------------
# dK and dV
# ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def _dkv_place(H, N_q, N_k, GROUP, CAUSAL: gl.constexpr):
    """b, h, bh, the first key, the first tile of queries that sees it, and the number of all tiles of queries."""
    block, b, h, bh = place(gl.cdiv(N_k, BLOCK), H, GROUP)
    n0 = block * BLOCK
    count = gl.cdiv(N_q, _TILE)
    first = 0
    if CAUSAL:
        first = gl.minimum(n0 // _TILE, count)
    return b, h, bh, n0, first, count


@gluon.jit
def _load_next_with_vector(desc, VECTORS, b, h, row, vector_start, buffers, vectors, ready, empty, step):
    """`load_next` with a piece of VECTORS, for the same barrier."""
    stage = step % _DKV_STAGES
    bar = ready.index(stage)
    mbarrier.wait(empty.index(stage), (step // _DKV_STAGES & 1) ^ 1)
    mbarrier.expect(bar, desc.block_type.nbytes + VECTORS.block_type.nbytes)
    load_tile(desc, b, h, row, buffers, stage, bar)
    copy_in(VECTORS, [vector_start], bar, vectors.index(stage))


@gluon.jit
def _dkv_producer(work, CAUSAL: gl.constexpr):
    """Load the tiles in the order in which the warpgroups read them."""
    descs, buffers, bars, _, H, N_q, N_k, GROUP = work
    q_, k_, v_, do_, _, _, VECTORS = descs
    q_buffers, k_buffers, v_buffers, do_buffers, lse2_buffers, delta_buffers = buffers
    k_ready, q_ready, q_empty, do_ready, do_empty = bars
    b, h, bh, n0, first, count = _dkv_place(H, N_q, N_k, GROUP, CAUSAL)
    for group in gl.static_range(_GROUPS):
        bar = k_ready.index(group)
        mbarrier.expect(bar, 2 * k_.block_type.nbytes)
        load_tile(k_, b, h, n0 + group * _ROWS, k_buffers, group, bar)
        load_tile(v_, b, h, n0 + group * _ROWS, v_buffers, group, bar)
    num_heads = gl.num_programs(0) // gl.cdiv(N_k, BLOCK)
    N_PAD = gl.cdiv(N_q, BLOCK) * BLOCK
    for t in range(first, count):
        row = t * _TILE
        _load_next_with_vector(
            q_, VECTORS, b, h, row, bh * N_PAD + row, q_buffers, lse2_buffers, q_ready, q_empty, t - first
        )
        _load_next_with_vector(
            do_, VECTORS, b, h, row, (num_heads + bh) * N_PAD + row, do_buffers, delta_buffers,
            do_ready, do_empty, t - first,
        )  # fmt: skip


@gluon.jit
def _dkv_probabilities(st, lse2, first_key, m0, sc, MASKED: gl.constexpr):
    pt = gl.exp2(st * sc - lse2[None, :])
    if MASKED:
        rows = m0 + gl.arange(0, _TILE, _COLUMN)
        keys = first_key + gl.arange(0, _ROWS, _ROW)
        pt = gl.where(rows[None, :] >= keys[:, None], pt, 0.0)
    return pt


@gluon.jit
def _dkv_loop(k, v, dk, dv, buffers, bars, first, lo, hi, first_key, sc, MASKED: gl.constexpr):
    """The tiles of queries from lo to hi. All scores are transposed.

    No wait has to be held back here: each comes after the start of a product with the numbers computed before.
    """
    q_buffers, _, _, do_buffers, lse2_buffers, delta_buffers = buffers
    _, q_ready, q_empty, do_ready, do_empty = bars
    for t in range(lo, hi):
        step = t - first
        stage = step % _DKV_STAGES
        st, dpt = _start_products(k, v, q_buffers, do_buffers, q_ready, do_ready, step)
        lse2 = lse2_buffers.index(stage).load(_COLUMN)
        st = warpgroup_mma_wait(1, [st])
        pt = _dkv_probabilities(st, lse2, first_key, t * _TILE, sc, MASKED)
        p = gl.convert_layout(pt.to(k.dtype), LEFT)
        dv = warpgroup_mma(p, do_buffers.index(stage), dv, is_async=True)
        delta = delta_buffers.index(stage).load(_COLUMN)
        dpt = warpgroup_mma_wait(1, [dpt])
        dst = gl.convert_layout((pt * (dpt - delta[None, :])).to(k.dtype), LEFT)
        dk = warpgroup_mma(dst, q_buffers.index(stage), dk, is_async=True)
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        mbarrier.arrive(q_empty.index(stage))
        mbarrier.arrive(do_empty.index(stage))
    return dk, dv


@gluon.jit
def _dkv_consumer(work, group: gl.constexpr, CAUSAL: gl.constexpr):
    """One warpgroup: dk and dv of its keys. Keys beyond N_k give rows that are not stored."""
    descs, buffers, bars, scale, H, N_q, N_k, GROUP = work
    _, _, _, _, dk_, dv_, _ = descs
    k, v = buffers[1].index(group), buffers[2].index(group)
    b, h, _bh, n0, first, count = _dkv_place(H, N_q, N_k, GROUP, CAUSAL)
    first_key = n0 + group * _ROWS
    sc = scale * LOG2_E
    mbarrier.wait(bars[0].index(group), 0)
    dv = gl.zeros([_ROWS, _D_PAD], gl.float32, OUTPUT)
    dk = gl.zeros([_ROWS, _D_PAD], gl.float32, OUTPUT)
    lo = first
    if CAUSAL:  # queries from the group's last key on see all of its keys
        lo = gl.minimum(gl.cdiv(first_key + _ROWS - 1, _TILE), count)
        dk, dv = _dkv_loop(k, v, dk, dv, buffers, bars, first, first, lo, first_key, sc, True)
    dk, dv = _dkv_loop(k, v, dk, dv, buffers, bars, first, lo, count, first_key, sc, False)
    store_tile(dk_, b, h, first_key, dk * scale, k)
    store_tile(dv_, b, h, first_key, dv, v)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def dkv_kernel(q_, k_, v_, do_, dk_, dv_, VECTORS, scale, H, N_q, N_k, GROUP, CAUSAL: gl.constexpr):
    """One tile of keys: dk and dv, with the VECTORS that `dq_kernel` has left."""
    dtype: gl.constexpr = q_.dtype
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, _ROWS, _D_PAD], shared)
    v_buffers = gl.allocate_shared_memory(dtype, [_GROUPS, _ROWS, _D_PAD], shared)
    q_buffers = gl.allocate_shared_memory(dtype, [_DKV_STAGES, _TILE, _D_PAD], shared)
    do_buffers = gl.allocate_shared_memory(dtype, [_DKV_STAGES, _TILE, _D_PAD], shared)
    lse2_buffers = gl.allocate_shared_memory(gl.float32, [_DKV_STAGES, _TILE], plain)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [_DKV_STAGES, _TILE], plain)
    k_ready = barriers(_GROUPS, 1)
    q_ready, q_empty = barriers(_DKV_STAGES, 1), barriers(_DKV_STAGES, _GROUPS)
    do_ready, do_empty = barriers(_DKV_STAGES, 1), barriers(_DKV_STAGES, _GROUPS)
    fence_async_shared()
    descs = (q_, k_, v_, do_, dk_, dv_, VECTORS)
    buffers = (q_buffers, k_buffers, v_buffers, do_buffers, lse2_buffers, delta_buffers)
    bars = (k_ready, q_ready, q_empty, do_ready, do_empty)
    work = (descs, buffers, bars, scale, H, N_q, N_k, GROUP)
    gl.warp_specialize(
        [(_dkv_consumer, (work, 0, CAUSAL)), (_dkv_consumer, (work, 1, CAUSAL)), (_dkv_producer, (work, CAUSAL))],
        [4, 1],
        [240, 24],
    )
