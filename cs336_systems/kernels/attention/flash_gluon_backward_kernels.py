"""The backward pass of `flash_triton` for Hopper in Gluon: one loop over the queries gives all three gradients.

A tile has 128 keys, and each of the two warpgroups 64 of them: it computes their part of the scores and of dP,
transposed, and adds to their dK and dV in registers. dQ needs the dS of all keys. The warpgroups exchange their dS in
shared memory, each computes one half of the tile's dQ, and TMA adds it to DQ, the sums of all programs in float32.
The order of these additions differs from run to run, and so do the last bits of dQ. Where ORDERED is true, programs add
in turn: those with later keys first, because with causal attention these reach a tile of queries first anyway.

The five products, in the order of FlashAttention-2's Algorithm 2: S = q k^T, dV += P^T do, dP = do v^T, dQ += dS k and
dK += dS^T q. S and dP are transposed here: their rows are keys, 64 for each warpgroup. Over time, for one tile of
queries where D_PAD is 128, with dQ' of the tile before:

    matrix units     S, dP ........ | dV ...... | dQ', dK ..................
    threads          (wait for S)   | P = exp2  | dS = P dP   store dS   store dQ', add it by TMA
    registers        S, dP, dK, dV  | P, dP     | dS          dQ'

Where D_PAD is 64 a tile is twice as long and has two halves, a and b, so that the threads wait less:

    matrix units     S a, dP a .... | dV a, dK a, S b, dP b, dQ' | dV b, dK b .........
    threads          (wait for S a) | P a, dS a  | P b, dS b     | store dQ'; TMA adds it beside S a of the next tile

Where D_PAD is 128, shared memory has place for four dS. A warpgroup writes one without a wait: both had read the dS
that it replaces before they told each other of the last but one. Where D_PAD is 64 there is place for two, and a
warpgroup waits until both have read.

Three kernels run one after the other: `gradients_kernel` is the loop; the two of `flash_gluon_sums_kernels.py` fill
INITIAL and clear DQ before it, and scale and round DQ after it.

Two things hide the waits. The product that gives dQ is one tile late: when it starts, the dS of the other warpgroup
came long ago. And the sums of scores and dP start from INITIAL instead of zero, so that no instruction subtracts the
logsumexp and delta afterwards, when shared memory is busy with products.

Legend, in addition to the legend of `flash_gluon_common.py`
    QUERIES        queries of a tile: 128 where D_PAD is 64, and 64 where it is 128
    INITIAL        (2 * B * H, N_PAD): -L / scale for all heads, then -delta = -rowsum(do * o) for all heads. Beyond
                   N_q L is infinite, so the probability is 0
    ADDED          for each block of DQ the number of programs that added to it. It follows COUNTER in memory
    start, first   the step of the first tile of a loop over the queries, and its number t: see `_tile_of_queries`
    passes         how many such loops came before. Each has one dS more than tiles: zeros, before its first tile
    DQ             (B * H * N_PAD * D_PAD / 32, 32): dq / scale in float32, in blocks of 64 queries and 64 columns, each
                   in the order of `_fragments`. Where D_PAD is 128 a block of columns 64 to 127 follows each block of
                   columns 0 to 63
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
    COPIES_OPERANDS,
    GROUPS,
    LENGTHS,
    LOG2_E,
    REGISTERS,
    ROWS,
    STAGES,
    add_out,
    after_query,
    apart,
    arrive,
    arrive_and_wait,
    barrier,
    barriers,
    copy_in,
    count_up,
    load_tile,
    next_tile,
    place,
    query_head,
    read_count,
    release,
    stage_of,
    store_tile,
    take_tile,
    viewed_as,
    wait_empty,
    wait_for_count,
    wait_for_memory,
    wait_ready,
    wait_released,
)

_ROWS, _GROUPS = gl.constexpr(ROWS), gl.constexpr(GROUPS)
_TILE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16]))
"""How the threads of a warpgroup divide 64 x 64 numbers."""
_KEY, _QUERY = gl.constexpr(gl.SliceLayout(1, _TILE.value)), gl.constexpr(gl.SliceLayout(0, _TILE.value))
_READ, _STORED = gl.constexpr(6), gl.constexpr(8)
"""The first of the named barriers: two for the stages, and four for the dS of each warpgroup."""
DQ_BLOCK = [128, 32]
"""A block of DQ, 64 x 64 numbers, has this shape."""


def queries_of_a_tile(d_pad: int) -> int:
    """QUERIES, as many as there is shared memory for."""
    return 8192 // d_pad


@gluon.jit
def _place(
    tile, H, N_q, N_k, band, TILES, HEADS,
    QUERIES: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """b, h, bh and the first key of a tile of keys, and the tiles of queries that see it, from `first` to `end`."""
    block, b, h, bh = place(tile, TILES, gl.cdiv(N_k, BLOCK), H // G, HEADS)
    if ORDERED:  # a program waits for those of later keys, so these begin first
        block = gl.cdiv(N_k, BLOCK) - 1 - block
    n0 = block * BLOCK
    end = gl.cdiv(N_q, QUERIES)
    first = 0
    if CAUSAL:
        first = gl.minimum(n0 // QUERIES, end)
    if BAND != "none":
        end = gl.minimum(gl.cdiv(after_query(n0 + BLOCK - 1, b, band, N_q, BAND), QUERIES), end)
    if QUERIES == 64 and not CAUSAL and not ORDERED:
        first = gl.minimum(n0 // QUERIES, end)
        end += first
    return b, h, bh, n0, first, end


@gluon.jit
def _tile_of_queries(t, N_q, QUERIES: gl.constexpr, CAUSAL: gl.constexpr, ORDERED: gl.constexpr):
    """Which tile of queries is number t of a loop.

    Where D_PAD is 128 and all queries see all keys, a loop begins at the queries beside its keys, and goes on at tile 0
    after the last one. If all loops began at tile 0, their sums would meet in the same blocks of DQ. Where D_PAD is 64
    they do begin there: measured, it is 1 % faster.
    """
    if QUERIES == 64 and not CAUSAL and not ORDERED:
        tiles = gl.cdiv(N_q, QUERIES)
        t = gl.where(t < tiles, t, t - tiles)
    return t


@gluon.jit
def _producer(
    work, D_PAD: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, ORDERED: gl.constexpr
):
    """Load the keys and values, then the tiles of queries in the order in which the warpgroups read them."""
    descs, buffers, bars, COUNTER, _, H, N_q, N_k, band, TILES, HEADS = work
    q_, k_, v_, do_, _, _, INITIAL, _ = descs
    k, v, q_buffers, do_buffers, s_initial, dp_initial, _, _, tiles = buffers
    tile_ready, kv_ready, kv_empty, ready, empty, _ = bars
    QUERIES: gl.constexpr = q_buffers.shape[1]
    N_PAD = gl.cdiv(N_q, BLOCK) * BLOCK
    num_heads = TILES // gl.cdiv(N_k, BLOCK) * G
    tile, i, start = gl.program_id(0), 0, 0
    while tile < TILES:
        b, h, bh, n0, first, end = _place(tile, H, N_q, N_k, band, TILES, HEADS, QUERIES, G, CAUSAL, BAND, ORDERED)
        mbarrier.wait(kv_empty.index(0), i & 1 ^ 1)
        mbarrier.expect(kv_ready.index(0), 2 * k_.block_type.nbytes)
        load_tile(k_, b, h, n0, k.index(0), kv_ready.index(0))
        load_tile(v_, b, h, n0, v.index(0), kv_ready.index(0))
        for g in range(G):
            q_h, q_bh = query_head(h, g, G), query_head(bh, g, G)
            for t in range(first, end):
                step = start + t - first
                stage, row = stage_of(step), _tile_of_queries(t, N_q, QUERIES, CAUSAL, ORDERED) * QUERIES
                if D_PAD == 64:
                    wait_empty(empty, step)
                else:
                    wait_released(_READ, step, _GROUPS)
                bar = ready.index(stage)
                mbarrier.expect(bar, 2 * (q_.block_type.nbytes + INITIAL.block_type.nbytes))
                load_tile(q_, b, q_h, row, q_buffers.index(stage), bar)
                copy_in(INITIAL, [q_bh * N_PAD + row], bar, s_initial.index(stage))
                load_tile(do_, b, q_h, row, do_buffers.index(stage), bar)
                copy_in(INITIAL, [(num_heads + q_bh) * N_PAD + row], bar, dp_initial.index(stage))
            start += end - first
        tile = take_tile(COUNTER, tiles, tile_ready, i)
        i += 1


@gluon.jit
def _here(buffer):
    """The only one of buffers. Its address is computed here, not before the loop, where it would occupy registers."""
    zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)
    return buffer.index(zero)


@gluon.jit
def _own(buffer, group: gl.constexpr):
    """A warpgroup's rows of the keys or values."""
    return _here(buffer).slice(group * _ROWS, _ROWS)


@gluon.jit
def _start_tile(a, b, initial):
    """Start a b^T, for the keys of a warpgroup and 64 queries, added to the queries' INITIAL."""
    sums, _ = gl.broadcast(initial.load(_QUERY)[None, :], gl.zeros([_ROWS, 64], gl.float32, _TILE))
    return warpgroup_mma(a, b.permute([1, 0]), sums, is_async=True)


@gluon.jit
def _probabilities(s, first_key, m0, limit, sc, N_k, CAUSAL: gl.constexpr, BAND: gl.constexpr, MASKED: gl.constexpr):
    p = gl.exp2(s * sc)
    if MASKED:  # after exp2, which may be infinite where a masked score is above the logsumexp
        keys = first_key + gl.arange(0, _ROWS, _KEY)
        seen = (keys < N_k)[:, None]
        if CAUSAL:
            row, offset = apart(gl.arange(0, 64, _QUERY)[None, :])
            first = gl.where(keys < N_k, keys, 2**31 - 1)  # no query sees keys beyond N_k
            seen = row >= (first - m0)[:, None] - offset
            if BAND != "none":
                seen = seen & (row < (limit - m0)[:, None] - offset)
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def _ds(ds_buffers, n):
    """The buffer of the n-th dS."""
    return ds_buffers.index(stage_of(n, ds_buffers.shape[0]))


@gluon.jit
def _tell(ds_ready, n, group: gl.constexpr, D_PAD: gl.constexpr):
    """A warpgroup has stored its part of the n-th dS."""
    if D_PAD == 64:
        mbarrier.arrive(ds_ready.index(stage_of(n)))
    else:
        arrive(_STORED + 4 * group + stage_of(n, 4), 256)


@gluon.jit
def _wait_told(ds_ready, n, group: gl.constexpr, D_PAD: gl.constexpr):
    """Wait until the other warpgroup has stored its part of the n-th dS."""
    if D_PAD == 64:
        wait_ready(ds_ready, n)
    else:
        arrive_and_wait(_STORED + 4 * (1 - group) + stage_of(n, 4), 256)


@gluon.jit
def _start_dq(k, ds_buffers, ds_ready, step, group: gl.constexpr, D_PAD: gl.constexpr):
    """Start a warpgroup's block of dq of the tile before: 64 of 128 queries, or 64 of 128 columns."""
    ds, k = _ds(ds_buffers, step), _here(k)
    if ds.shape[1] == 128:
        ds = ds.slice(group * 64, 64, 1)
    else:
        k = k.slice(group * 64, 64, 1)
    _wait_told(ds_ready, step, group, D_PAD)
    zeros = gl.zeros([64, 64], gl.float32, _TILE)
    return warpgroup_mma(ds.permute([1, 0]), k, zeros, use_acc=False, is_async=True)


@gluon.jit
def _fragments(x):
    """64 x 64 numbers in the order in which the threads hold them: each writes four at a time, without conflicts."""
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([128, 32])


@gluon.jit
def _turn(t, first_key, N_k, QUERIES: gl.constexpr, CAUSAL: gl.constexpr):
    """How many programs add to tile t of the queries before this one: those with later keys that it sees."""
    last = gl.cdiv(N_k, BLOCK) - 1
    if CAUSAL:
        last = gl.minimum(last, t * QUERIES // BLOCK)
    return last - first_key // BLOCK


@gluon.jit
def _store_dq(dq, buffer, added, has_added, ORDERED: gl.constexpr):
    """Store a warpgroup's dq in its buffer, once TMA has read the buffer. ORDERED: count the block that TMA added."""
    if ORDERED:
        wait_for_memory()
    tma.store_wait(0)
    buffer.store(_fragments(dq))
    if ORDERED:
        count_up(added, has_added)


@gluon.jit
def _added(ADDED, block, ORDERED: gl.constexpr):
    """ORDERED: how many programs have added to a block of DQ. Read early, because the answer takes a while."""
    seen = 0
    if ORDERED:
        seen = read_count(ADDED + block)
    return seen


@gluon.jit
def _add_to_dq(DQ, ADDED, block, buffer, seen, turn, ORDERED: gl.constexpr):
    """Have TMA add a buffer to a block of DQ. ORDERED: after `turn` others; `seen` of them were done before."""
    fence_async_shared()
    if ORDERED:
        wait_for_count(ADDED + block, seen, turn)
    add_out(DQ, [block * 128, 0], buffer)


@gluon.jit
def _loop_in_halves(
    k, dk, dv, work, group: gl.constexpr, passes, start, first, lo, hi, first_key, limit, dq_block,
    LEFT: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, MASKED: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """The tiles of 128 queries from lo to hi, where D_PAD is 64: the first 64 queries, then the others.

    Halves need half of the registers for scores and dP. The products of one half run beside the exponentials of the
    other. A fence waits until stores to shared memory are done, so each stands behind the start of more products: TMA
    adds the dQ of a tile while the next tile but one runs.
    """
    descs, buffers, bars, COUNTER, scale, _, _, N_k, _, _, _ = work
    all_k, all_v, q_buffers, do_buffers, s_initial, dp_initial, ds_buffers, dq_buffers, _ = buffers
    _, _, _, ready, empty, ds_ready = bars
    sc = scale * LOG2_E
    ADDED = COUNTER + 1
    for t in range(lo, hi):
        step = start + t - first
        stage = stage_of(step)
        q, do = q_buffers.index(stage), do_buffers.index(stage)
        q1, q2, do1, do2 = q.slice(0, 64), q.slice(64, 64), do.slice(0, 64), do.slice(64, 64)
        seen = _added(ADDED, dq_block + gl.maximum(t - 2, first) * _GROUPS, ORDERED)
        wait_ready(ready, step)
        # From registers, a product reads a third less from shared memory; where D_PAD is 128, k does not fit into them.
        own_k, own_v = k, _own(all_v, group)  # v here: ptxas 12.8 loses an address that two loops share
        if COPIES_OPERANDS:
            own_k = _own(all_k, group).load(LEFT)
        s = _start_tile(own_k, q1, s_initial.index(stage).slice(0, 64))
        dp = _start_tile(own_v, do1, dp_initial.index(stage).slice(0, 64))
        if t > first + 1:
            turn = _turn(t - 2, first_key, N_k, 128, CAUSAL)
            _add_to_dq(descs[7], ADDED, dq_block + (t - 2) * _GROUPS, dq_buffers.index(group), seen, turn, ORDERED)
        s = warpgroup_mma_wait(1, [s])
        p = _probabilities(s, first_key, t * 128, limit, sc, N_k, CAUSAL, BAND, MASKED)
        dp = warpgroup_mma_wait(0, [dp])
        ds = (p * dp).to(q.dtype)
        wait_empty(empty, step + 1)  # both groups have read the dS of two tiles ago, in the tile before
        ds_buffer = _ds(ds_buffers, step + passes + 1).slice(group * _ROWS, _ROWS)
        ds_buffer.slice(0, 64, 1).store(ds)
        dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), LEFT), do1, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q1, dk, is_async=True)
        s = _start_tile(own_k, q2, s_initial.index(stage).slice(64, 64))
        dp = _start_tile(own_v, do2, dp_initial.index(stage).slice(64, 64))
        dq = _start_dq(all_k, ds_buffers, ds_ready, step + passes, group, 64)
        s, dv, dk = warpgroup_mma_wait(2, [s, dv, dk])
        p = _probabilities(s, first_key, t * 128 + 64, limit, sc, N_k, CAUSAL, BAND, MASKED)
        dp = warpgroup_mma_wait(1, [dp])
        ds = (p * dp).to(q.dtype)
        ds_buffer.slice(64, 64, 1).store(ds)
        dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), LEFT), do2, dv, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q2, dk, is_async=True)
        fence_async_shared()
        _tell(ds_ready, step + passes + 1, group, 64)
        dq = warpgroup_mma_wait(2, [dq])
        _store_dq(dq, dq_buffers.index(group), ADDED + dq_block + (t - 2) * _GROUPS, t > first + 1, ORDERED)
        dv, dk = warpgroup_mma_wait(0, [dv, dk])
        mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _loop(
    k, dk, dv, work, group: gl.constexpr, passes, start, first, lo, hi, first_key, limit, dq_block,
    LEFT: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, MASKED: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """The tiles of 64 queries from lo to hi, where D_PAD is 128."""
    descs, buffers, bars, COUNTER, scale, _, N_q, N_k, _, _, _ = work
    all_k, all_v, q_buffers, do_buffers, s_initial, dp_initial, ds_buffers, dq_buffers, _ = buffers
    _, _, _, ready, _, ds_ready = bars
    sc = scale * LOG2_E
    ADDED = COUNTER + 1
    for t in range(lo, hi):
        step = start + t - first
        stage = stage_of(step)
        q, do = q_buffers.index(stage), do_buffers.index(stage)
        seen = _added(ADDED, dq_block + gl.maximum(t - 1, first) * _GROUPS, ORDERED)
        wait_ready(ready, step)
        s = _start_tile(_own(all_k, group), q, s_initial.index(stage))
        dp = _start_tile(_own(all_v, group), do, dp_initial.index(stage))
        s = warpgroup_mma_wait(1, [s])
        p = _probabilities(s, first_key, t * 64, limit, sc, N_k, CAUSAL, BAND, MASKED)
        dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), LEFT), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        ds = (p * dp).to(q.dtype)
        _ds(ds_buffers, step + passes + 1).slice(group * _ROWS, _ROWS).store(ds)
        fence_async_shared()
        _tell(ds_ready, step + passes + 1, group, 128)
        dq = _start_dq(all_k, ds_buffers, ds_ready, step + passes, group, 128)
        dk = warpgroup_mma(gl.convert_layout(ds, LEFT), q, dk, is_async=True)
        dq, dv = warpgroup_mma_wait(1, [dq, dv])
        if t > first:
            _store_dq(dq, dq_buffers.index(group), ADDED + dq_block + (t - 2) * _GROUPS, t > first + 1, ORDERED)
            turn = _turn(t - 1, first_key, N_k, 64, CAUSAL)
            block = dq_block + _tile_of_queries(t - 1, N_q, 64, CAUSAL, ORDERED) * _GROUPS
            _add_to_dq(descs[7], ADDED, block, dq_buffers.index(group), seen, turn, ORDERED)
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
        release(_READ, step, _GROUPS)
    return dk, dv


@gluon.jit
def _consumer(
    work, group: gl.constexpr, D_PAD: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: dk and dv of its keys, and its blocks of DQ. Keys beyond N_k give rows that are not stored."""
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    LOOP: gl.constexpr = _loop_in_halves if D_PAD == 64 else _loop
    descs, buffers, bars, COUNTER, scale, H, N_q, N_k, band, TILES, HEADS = work
    dk_, dv_, DQ, ADDED = descs[4], descs[5], descs[7], COUNTER + 1
    all_k, _, q_buffers, _, _, _, ds_buffers, dq_buffers, tiles = buffers
    tile_ready, kv_ready, kv_empty, _, empty, ds_ready = bars
    QUERIES: gl.constexpr = q_buffers.shape[1]
    # dk and dv leave by way of the buffer of dq: at the same time where it has place for two tiles of 16 bits.
    PLACES: gl.constexpr = 128 // D_PAD
    out = viewed_as(dq_buffers.index(group), dk_.dtype, [PLACES, _ROWS, D_PAD], gl.NVMMASharedLayout(128, 16, 2))
    tile, i, start = gl.program_id(0), 0, 0
    b, h, bh, n0, first, end = _place(tile, H, N_q, N_k, band, TILES, HEADS, QUERIES, G, CAUSAL, BAND, ORDERED)
    while tile < TILES:
        first_key = n0 + group * _ROWS
        limit = first_key
        if BAND != "none":
            limit = after_query(first_key + gl.arange(0, _ROWS, _KEY), b, band, N_q, BAND)
        mbarrier.wait(kv_ready.index(0), i & 1)
        dk = gl.zeros([_ROWS, D_PAD], gl.float32, OUTPUT)
        dv = gl.zeros([_ROWS, D_PAD], gl.float32, OUTPUT)
        for g in range(G):
            passes = i * G + g
            dq_block = query_head(bh, g, G) * gl.cdiv(N_q, BLOCK) * (D_PAD // 32) + group
            if D_PAD == 64 and g > 0:  # both groups have read the dS before the last one; if g is 0 by kv_ready
                wait_empty(empty, start + 1)
            # The first tile of queries has no tile before it: the loop multiplies these zeros instead.
            zeros = gl.zeros([_ROWS, QUERIES], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16]))
            if D_PAD == 64 or end > first:
                _ds(ds_buffers, start + passes).slice(group * _ROWS, _ROWS).store(zeros.to(dk_.dtype))
                fence_async_shared()
                _tell(ds_ready, start + passes, group, D_PAD)
            if D_PAD == 64 and g > 0:  # both groups have read the last dS
                wait_ready(ds_ready, start + passes)
            k = all_k
            if D_PAD == 64 and not COPIES_OPERANDS:
                k = _own(all_k, group).load(LEFT)
            full = first  # the first tile of queries that needs no mask
            if CAUSAL:
                full = gl.minimum(first + BLOCK // QUERIES, end)
            if n0 + BLOCK > N_k:
                full = end
            inner = end  # the first tile of queries after those that need no mask
            if BAND != "none":
                inner = gl.minimum(gl.maximum(after_query(n0, b, band, N_q, BAND) // QUERIES, full), end)
            dk, dv = LOOP(
                k, dk, dv, work, group, passes, start, first, first, full, first_key, limit, dq_block,
                LEFT, CAUSAL, BAND, True, ORDERED,
            )  # fmt: skip
            dk, dv = LOOP(
                k, dk, dv, work, group, passes, start, first, full, inner, first_key, limit, dq_block,
                LEFT, CAUSAL, BAND, False, ORDERED,
            )  # fmt: skip
            if BAND != "none":
                dk, dv = LOOP(
                    k, dk, dv, work, group, passes, start, first, inner, end, first_key, limit, dq_block,
                    LEFT, CAUSAL, BAND, True, ORDERED,
                )  # fmt: skip
            start += end - first
            if end > first:
                last = dq_block + _tile_of_queries(end - 1, N_q, QUERIES, CAUSAL, ORDERED) * _GROUPS
                before = last - _GROUPS
                if D_PAD == 64 and end > first + 1:
                    turn = _turn(end - 2, first_key, N_k, QUERIES, CAUSAL)
                    seen = _added(ADDED, before, ORDERED)
                    _add_to_dq(DQ, ADDED, before, dq_buffers.index(group), seen, turn, ORDERED)
                dq = _start_dq(all_k, ds_buffers, ds_ready, start + passes, group, D_PAD)
                dq = warpgroup_mma_wait(0, [dq])
                _store_dq(dq, dq_buffers.index(group), ADDED + before, end > first + 1, ORDERED)
                turn = _turn(end - 1, first_key, N_k, QUERIES, CAUSAL)
                seen = _added(ADDED, last, ORDERED)
                _add_to_dq(DQ, ADDED, last, dq_buffers.index(group), seen, turn, ORDERED)
                if ORDERED:
                    wait_for_memory()
                    barrier()
                    count_up(ADDED + last, True)
        mbarrier.arrive(kv_empty.index(0))
        # The next place is found while TMA adds to DQ.
        tile = next_tile(tiles, tile_ready, i)
        next_b, next_h, bh, n0, first, end = _place(
            gl.minimum(tile, TILES - 1), H, N_q, N_k, band, TILES, HEADS, QUERIES, G, CAUSAL, BAND, ORDERED
        )
        tma.store_wait(0)
        store_tile(dk_, b, h, first_key, dk * scale, out.index(0))
        if PLACES == 1:
            tma.store_wait(0)
        store_tile(dv_, b, h, first_key, dv, out.index(PLACES - 1))
        b, h, i = next_b, next_h, i + 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=LENGTHS)
def gradients_kernel(
    q_, k_, v_, do_, dk_, dv_, INITIAL, DQ, COUNTER, DOCUMENT_ENDS, scale, H, N_q, N_k, WINDOW, TILES, HEADS,
    D_PAD: gl.constexpr, G: gl.constexpr, CAUSAL: gl.constexpr, BAND: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """dk and dv of this program's tiles of keys, and their part of DQ."""
    dtype: gl.constexpr = q_.dtype
    QUERIES: gl.constexpr = q_.block_type.shape[2]
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    k = gl.allocate_shared_memory(dtype, [1, BLOCK, D_PAD], shared)
    v = gl.allocate_shared_memory(dtype, [1, BLOCK, D_PAD], shared)
    q_buffers = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, D_PAD], shared)
    do_buffers = gl.allocate_shared_memory(dtype, [STAGES, QUERIES, D_PAD], shared)
    s_initial = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    dp_initial = gl.allocate_shared_memory(gl.float32, [STAGES, QUERIES], plain)
    ds_buffers = gl.allocate_shared_memory(dtype, [2 if D_PAD == 64 else 4, BLOCK, QUERIES], shared)
    dq_buffers = gl.allocate_shared_memory(gl.float32, [_GROUPS, 128, 32], gl.NVMMASharedLayout(128, 32, 2))
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 32], plain)
    tile_ready = barriers(STAGES, 1)
    kv_ready, kv_empty = barriers(1, 1), barriers(1, _GROUPS)
    ready, empty = barriers(STAGES, 1), barriers(STAGES, _GROUPS)
    ds_ready = barriers(STAGES, _GROUPS)
    fence_async_shared()
    descs = (q_, k_, v_, do_, dk_, dv_, INITIAL, DQ)
    buffers = (k, v, q_buffers, do_buffers, s_initial, dp_initial, ds_buffers, dq_buffers, tiles)
    bars = (tile_ready, kv_ready, kv_empty, ready, empty, ds_ready)
    band = (DOCUMENT_ENDS, DOCUMENT_ENDS, WINDOW)  # the starts are not used
    work = (descs, buffers, bars, COUNTER, scale, H, N_q, N_k, band, TILES, HEADS)
    gl.warp_specialize(
        [
            (_consumer, (work, 0, D_PAD, G, CAUSAL, BAND, ORDERED)),
            (_consumer, (work, 1, D_PAD, G, CAUSAL, BAND, ORDERED)),
            (_producer, (work, D_PAD, G, CAUSAL, BAND, ORDERED)),
        ],
        [4, 1],
        REGISTERS,
    )
