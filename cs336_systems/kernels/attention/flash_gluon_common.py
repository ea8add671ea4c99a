"""Shared by the Gluon kernels of `flash_triton`: one warp loads, two groups of four warps compute.

In each kernel a group of four warps (a warpgroup) owns ROWS rows and loops over tiles of other tensors. One more warp
makes TMA bring these tiles into shared memory. The loading warp and the warpgroups synchronise only by barriers.

Legend, in addition to the legend of `flash_triton_kernels.py`
    q_, k_, ...    descriptors of the tensors: TMA loads and stores their tiles
    ROWS           rows of a warpgroup; a program has GROUPS * ROWS
    STAGES         how many tiles of each tensor of the inner loop are in shared memory at a time
    step           the number of tiles so far; tile `step` is in stage step % STAGES
    round          step // STAGES: how often the stage was used before. A barrier alternates between two phases: a wait
                   with phase n & 1 waits for its n-th completion, counted from 0. A wait with the other phase returns
                   at once the first time
    ready          barriers that complete when TMA has filled a stage
    empty          barriers that complete when all warpgroups have read a stage
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Triton 3.6 has the second name of each, 3.9 the first.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

D_PAD = 128
"""The padded head size of these kernels."""
ROWS = 64
GROUPS = 2
BLOCK = gl.constexpr(ROWS * GROUPS)
"""Rows of a program. VECTORS is padded to a multiple of this."""
LAYOUTS = {
    4: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4),
    1: gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1),
}
"""How TMA lays out a tile (4 axes) and a piece of VECTORS (1 axis) in shared memory."""
NUM_WARPS = 4
"""Warps of the first warpgroup; a kernel adds a second warpgroup and the warp that loads."""
MAX_REGISTERS = 168
"""Per thread: 65,536 over 12 warps. The kernels redistribute them."""
LENGTHS = ["H", "N_q", "N_k", "GROUP"]  # no kernel is recompiled for a length of 1 or a multiple of 16
LOG2_E = gl.constexpr(math.log2(math.e))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_PAD, 16]))
"""How the threads of a warpgroup divide the ROWS x D_PAD sums that it keeps in registers."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, OUTPUT.value, 2))
"""The same for the left operand of the products that are added to them."""


@gluon.jit
def place(num_blocks, H, GROUP):
    """This program's block, b, h and bh: `_program` of the Triton kernels."""
    program = gl.program_id(0)
    first = program // (num_blocks * GROUP) * GROUP
    size = gl.minimum(GROUP, gl.num_programs(0) // num_blocks - first)
    within = program - first * num_blocks
    bh = first + within % size
    return within // size, bh // H, bh % H, bh


@gluon.jit
def place_of_queries(H, N_q, N_k, GROUP, TILE: gl.constexpr, CAUSAL: gl.constexpr):
    """This program's b, h, bh and first query, and the number of tiles of TILE keys that it sees."""
    num_blocks = gl.cdiv(N_q, BLOCK)
    block, b, h, bh = place(num_blocks, H, GROUP)
    m0 = (num_blocks - 1 - block) * BLOCK
    end = N_k
    if CAUSAL:
        end = gl.minimum(m0 + BLOCK, N_k)
    return b, h, bh, m0, gl.cdiv(end, TILE)


@gluon.jit
def visible(x, first_row, n0, N_k, CAUSAL: gl.constexpr, S: gl.constexpr):
    """The mask of x, a tile of scores laid out as S: whether the queries from first_row see the keys from n0."""
    rows = first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, S))
    columns = n0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, S))
    seen = (columns < N_k)[None, :]
    if CAUSAL:
        seen = seen & (rows[:, None] >= columns[None, :])
    return seen


@gluon.jit
def barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers. Each completes after so many arrivals, when all bytes that it expects have come."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def load_tile(desc, b, h, row, buffers, stage, bar):
    """Have TMA fill a stage with the rows from `row`, zeros beyond the tensor. The barrier expects them."""
    copy_in(desc, [b, h, row, 0], bar, buffers.index(stage).reshape(desc.block_type.shape))


@gluon.jit
def load_next(desc, b, h, row, buffers, ready, empty, step):
    """Have TMA fill the stage of a step, as soon as the stage has been read."""
    STAGES: gl.constexpr = buffers.shape[0]
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    bar = ready.index(stage)
    mbarrier.expect(bar, desc.block_type.nbytes)
    load_tile(desc, b, h, row, buffers, stage, bar)


@gluon.jit
def store_tile(desc, b, h, row, x, buffer):
    """Have TMA store x by way of a buffer. It skips elements beyond the tensor."""
    buffer.store(x.to(desc.dtype))
    fence_async_shared()
    copy_out(desc, [b, h, row, 0], buffer.reshape(desc.block_type.shape))
