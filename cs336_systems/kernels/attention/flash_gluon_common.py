"""Shared by the Gluon kernels of `flash_triton`: one warp loads, two or three groups of four warps compute.

In each kernel a group of four warps (a warpgroup) owns ROWS rows and loops over tiles of other tensors. One more warp
makes TMA bring these tiles into shared memory. The loading warp and the warpgroups synchronise only by barriers.

There are as many programs as the GPU has multiprocessors. Each one computes tile after tile of GROUPS * ROWS rows. Its
loading warp takes the next tile from a counter in memory, and loads for it while the warpgroups finish the tile before.

Legend, in addition to the legend of `flash_triton_kernels.py`
    q_, k_, ...    descriptors of the tensors: TMA loads and stores their tiles
    ROWS           rows of a warpgroup
    GROUPS         warpgroups that compute: 2, and 3 in the forward pass where D_PAD is 64 and there is no band
    TURNS          whether the two warpgroups of the forward pass start products in turns
    TILES          the number of all programs' tiles; those with the most work come first
    COUNTER        how many of them have been taken, not counting each program's first
    i              the number of this program's tiles so far
    STAGES         how many tiles of each tensor of the inner loop are in shared memory at a time
    step           the number of a tile of the inner loop, counted over all tiles of the program. It is in stage
                   step % STAGES
    round          step // STAGES: how often the stage was used before. A wait with phase n & 1 waits for the n-th
                   completion of a barrier, from 0 on. Before completion 0, a wait with phase 1 returns at once
    ready          barriers that complete when TMA has filled a stage
    empty          barriers that complete when all warpgroups have read a stage; `release` arrives at named ones instead
"""

import math

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Triton 3.6 has the second name of each, 3.9 the first.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
COPIES_OPERANDS = gl.constexpr(hasattr(tma, "async_load"))
"""Whether Triton copies an operand in registers for each product. 3.9 does, which leaves fewer for other numbers."""
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
if hasattr(tma, "async_atomic_add"):
    add_out = tma.async_atomic_add
else:  # Triton 3.6 can, but has no name for it

    @builtin
    def add_out(desc, coord, src, _semantic=None):
        """Have TMA add a tile in shared memory to the tensor."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def viewed_as(buffer, dtype, shape, layout, _semantic=None):
    """The same shared memory with another dtype, shape and layout. The method is private in 3.6, public in 3.9."""
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return _semantic.memdesc_reinterpret(buffer, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))


HEAD_SIZES = (64, 128)
"""The padded head sizes of these kernels."""
ROWS = 64
GROUPS = 2
BLOCK = gl.constexpr(ROWS * GROUPS)
"""Rows of a program's tile, where two warpgroups compute."""
LAYOUTS = {
    4: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4),
    2: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2),
    1: gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1),
}
"""How TMA lays out a tile (4 axes), a block of DQ (2 axes) and a piece of INITIAL (1 axis) in shared memory."""
NUM_WARPS = 4
"""Warps of the first warpgroup; a kernel adds the other warpgroups and the warp that loads."""
MAX_REGISTERS = {2: 168, 3: 128}
"""Per thread, by GROUPS: 65,536 over 12 or 16 warps (the loading one counts as four). The kernels redistribute them."""
REGISTERS, REGISTERS_OF_THREE = gl.constexpr([240, 24]), gl.constexpr([160, 160, 32])
"""Per thread, of the warpgroups after the first and of the warp that loads. The first gets as many, the rest."""
LENGTHS = ["H", "N_q", "N_k", "WINDOW", "TILES", "HEADS"]
"""No kernel is recompiled for a length of 1 or a multiple of 16."""
_ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
LOG2_E = gl.constexpr(math.log2(math.e))
STAGES = gl.constexpr(2)


@gluon.jit
def place(tile, tiles, num_blocks, H, HEADS):
    """The block, b, h and bh of a tile, as `_program` of the Triton kernels."""
    first = tile // (num_blocks * HEADS) * HEADS
    size = gl.minimum(HEADS, tiles // num_blocks - first)
    within = tile - first * num_blocks
    bh = first + within % size
    return within // size, bh // H, bh % H, bh


@gluon.jit
def key_head(head, G: gl.constexpr):
    """The key head of a query head: for h as for bh."""
    return head // G


@gluon.jit
def query_head(head_of_keys, g, G: gl.constexpr):
    """The g-th of the G query heads of a key head: for h as for bh."""
    return head_of_keys * G + g


@gluon.jit
def first_key(row, b, band, N, BAND: gl.constexpr):
    """As `_first_key` of the Triton kernels."""
    starts, _, window = band
    row = gl.minimum(row, N - 1)
    first = gl.maximum(row - window + 1, 0)
    if BAND == "documents":
        first = gl.maximum(first, gl.load(starts + b.to(gl.int64) * N + row))
    return first


@gluon.jit
def after_query(column, b, band, N, BAND: gl.constexpr):
    """As `_after_query` of the Triton kernels."""
    _, ends, window = band
    after = column + window
    if BAND == "documents":
        after = gl.minimum(after, gl.load(ends + b.to(gl.int64) * N + gl.minimum(column, N - 1)))
    return after


@gluon.jit
def barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers. Each completes after so many arrivals, when all bytes that it expects have come."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def stage_of(step, COUNT: gl.constexpr = STAGES):
    """step % COUNT. For a `%`, Triton 3.9 makes one vector division of two, and each thread keeps its own result."""
    return step & (COUNT - 1)


@gluon.jit
def phase_of(step):
    """The phase of a step's round: (step // STAGES) & 1, where STAGES is 2."""
    return step >> 1 & 1


@gluon.jit
def apart(numbers):
    """The columns of a product's layout as a sum of two: a constant, and a number that a thread has for all columns.

    A thread has columns 0, 1, 8, 9, 16 and so on, plus 0, 2, 4 or 6. Comparing the constants saves a register for each.
    """
    return numbers & -7, numbers & 6


@gluon.jit
def wait_ready(ready, step):
    """Wait until TMA has filled the stage of a step."""
    mbarrier.wait(ready.index(stage_of(step)), phase_of(step))


@gluon.jit
def wait_empty(empty, step):
    """Wait until the stage of a step has been read, in its round before."""
    mbarrier.wait(empty.index(stage_of(step)), phase_of(step) ^ 1)


@gluon.jit
def take_tile(COUNTER, tiles, tile_ready, i):
    """Take the tile after the i-th from the counter, and tell the warpgroups.

    Its number overwrites that of tile i - 1. All warpgroups have read that one, because they have begun tile i - 1.
    relaxed: the counter orders no other memory, and the fences of the default take as long as a step.
    """
    lanes = gl.arange(0, 32, _ONE_WARP)
    ones = gl.full([32], 1, gl.int32, _ONE_WARP)
    taken = gl.atomic_add(COUNTER + lanes * 0, ones, mask=lanes == 0, sem="relaxed")
    tile = gl.num_programs(0) + gl.max(gl.where(lanes == 0, taken, 0), 0)
    tiles.index(stage_of(i)).store(tile * ones)
    mbarrier.arrive(tile_ready.index(stage_of(i)))
    return tile


@gluon.jit
def next_tile(tiles, tile_ready, i):
    """The tile after the i-th, which the loading warp has taken."""
    wait_ready(tile_ready, i)
    return gl.max(tiles.index(stage_of(i)).load(_FOUR_WARPS), 0)


@gluon.jit
def arrive(number, THREADS: gl.constexpr):
    """A warpgroup arrives at a named barrier and does not wait for the THREADS that meet there.

    There are 16 of them in hardware, by number: Triton uses the first ones, these kernels those from 6 on. The
    warps of a group do not wait for each other, as Triton makes them before they arrive at an mbarrier.
    """
    number = gl.full([128], number, gl.int32, _FOUR_WARPS)
    gl.inline_asm_elementwise(f"bar.arrive $1, {THREADS}; mov.b32 $0, 0;", "=r,r", [number], gl.int32, False, 1)


@gluon.jit
def arrive_and_wait(number, THREADS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Wait at a named barrier until THREADS have arrived, those of these WARPS among them."""
    layout: gl.constexpr = _FOUR_WARPS if WARPS == 4 else _ONE_WARP
    number = gl.full([32 * WARPS], number, gl.int32, layout)
    gl.inline_asm_elementwise(f"bar.sync $1, {THREADS}; mov.b32 $0, 0;", "=r,r", [number], gl.int32, False, 1)


@gluon.jit
def release(read: gl.constexpr, step, GROUPS: gl.constexpr):
    """A warpgroup has read the stage of a step."""
    arrive(read + stage_of(step), 128 * GROUPS + 32)


@gluon.jit
def wait_released(read: gl.constexpr, step, GROUPS: gl.constexpr):
    """The loading warp waits until all warpgroups have read the stage of a step, in its round before."""
    if step >= STAGES:
        arrive_and_wait(read + stage_of(step), 128 * GROUPS + 32, 1)


@gluon.jit
def load_tile(desc, b, h, row, buffer, bar):
    """Have TMA fill a buffer with the rows from `row`, zeros beyond the tensor. The barrier expects them."""
    copy_in(desc, [b, h, row, 0], bar, buffer.reshape(desc.block_type.shape))


@gluon.jit
def store_tile(desc, b, h, row, x, buffer):
    """Have TMA store x by way of a buffer. It skips elements beyond the tensor."""
    buffer.store(x.to(desc.dtype))
    fence_async_shared()
    copy_out(desc, [b, h, row, 0], buffer.reshape(desc.block_type.shape))


@gluon.jit
def wait_for_memory():
    """Wait until the stores and sums that this warpgroup gave to TMA are in memory, not only read by TMA."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [gl.arange(0, 128, _FOUR_WARPS)], gl.int32, False, 1
    )


@gluon.jit
def count_up(counter, condition):
    """Add one to a counter in memory, if the condition holds. What `wait_for_memory` waited for is there before."""
    threads = gl.arange(0, 128, _FOUR_WARPS)
    ones = gl.full([128], 1, gl.int32, _FOUR_WARPS)
    gl.atomic_add(counter + threads * 0, ones, mask=(threads == 0) & condition, sem="relaxed")


@gluon.jit
def read_count(counter):
    """A counter in memory, as it is now."""
    return gl.load(counter, volatile=True)


@gluon.jit
def wait_for_count(counter, seen, count):
    """Wait until a counter in memory has reached a count; it was `seen` before."""
    while seen < count:
        seen = read_count(counter)
