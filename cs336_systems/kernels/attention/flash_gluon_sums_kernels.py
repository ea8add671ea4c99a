"""The kernels before and after the loop of `flash_gluon_backward_kernels.py`, which has the legend."""

import triton
import triton.language as tl

from .flash_gluon_common import LENGTHS


@triton.jit
def _offsets(strides, b, h, rows, columns):
    start = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return start + rows.to(tl.int64)[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit(do_not_specialize=LENGTHS)
def prepare_kernel(
    o_, do_, L, INITIAL, DQ, COUNTER, o_strides, do_strides, scale, H, N_q, D: tl.constexpr, D_PAD: tl.constexpr
):  # fmt: skip
    """INITIAL and zeros in DQ and ADDED, for 64 queries; zero in COUNTER."""
    tiles = tl.cdiv(N_q, 128) * 2
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    rows, columns = tile * 64 + tl.arange(0, 64), tl.arange(0, D_PAD)
    ok = (rows < N_q)[:, None] & (columns < D)[None, :]
    o = tl.load(o_ + _offsets(o_strides, bh // H, bh % H, rows, columns), mask=ok, other=0.0).to(tl.float32)
    do = tl.load(do_ + _offsets(do_strides, bh // H, bh % H, rows, columns), mask=ok, other=0.0).to(tl.float32)
    logsumexp = tl.load(L + bh.to(tl.int64) * N_q + rows, mask=rows < N_q, other=float("inf"))
    initial = INITIAL + bh.to(tl.int64) * tiles * 64 + rows
    tl.store(initial, -logsumexp / scale)
    tl.store(initial + (tl.num_programs(0) // tiles).to(tl.int64) * tiles * 64, -tl.sum(o * do, 1))
    tl.store(COUNTER, 0, mask=tl.program_id(0) == 0)
    for i in tl.static_range(D_PAD // 64):
        tl.store(COUNTER + 1 + tl.program_id(0) * (D_PAD // 64) + i, 0)
    zeros = tl.zeros([64 * D_PAD], tl.float32)
    tl.store(DQ + tl.program_id(0).to(tl.int64) * 64 * D_PAD + tl.arange(0, 64 * D_PAD), zeros)


@triton.jit(do_not_specialize=LENGTHS)
def finish_kernel(dq_, DQ, dq_strides, scale, H, N_q, D: tl.constexpr, D_PAD: tl.constexpr):
    """dq of 64 queries."""
    tiles = tl.cdiv(N_q, 128) * 2
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    rows = tile * 64 + tl.arange(0, 64)
    for start in tl.static_range(0, D_PAD, 64):
        block = DQ + (tl.program_id(0).to(tl.int64) * D_PAD + start) * 64
        x = tl.load(block + tl.arange(0, 4096)).reshape([8, 4, 8, 4, 2, 2])
        dq = x.permute([1, 4, 2, 0, 3, 5]).reshape([64, 64]) * scale  # the inverse of the loop's `_fragments`
        columns = start + tl.arange(0, 64)
        ok = (rows < N_q)[:, None] & (columns < D)[None, :]
        tl.store(
            dq_ + _offsets(dq_strides, bh // H, bh % H, rows, columns), dq.to(dq_.dtype.element_ty), mask=ok
        )  # fmt: skip
