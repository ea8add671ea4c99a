// Moving registers from warps that copy to warps that compute.
//
// At launch all threads of a block have the same number of registers: 65,536 divided by the number of threads, rounded
// down to a multiple of 8. A warpgroup that keeps 64 rows of scores and of the output in registers needs more. A warp
// that only starts copies needs few. `setmaxnreg` changes the number for the executing warpgroup while the kernel runs:
// `give_registers` returns some to the block, `take_registers` waits until the block has enough.
//
//     threads of the block    at launch    loading    computing
//     384 = 3 warpgroups      168          24         240, 240           3 x 168 = 504 = 24 + 2 x 240
//     512 = 4 warpgroups      128          32         160, 160, 160      4 x 128 = 512 = 32 + 3 x 160
//
// In the code that follows, ptxas allocates up to these numbers, under four conditions:
//   - the kernel says how many threads a block has, and that one block a multiprocessor is enough:
//     __launch_bounds__(threads, 1), so that the number at launch is fixed;
//   - all four warps of the warpgroup execute the instruction;
//   - the numbers are multiples of 8, from 24 to 256;
//   - each role is one branch of one `if` at the top of the kernel, and nothing follows the branches.
// Otherwise it ignores the instruction (C7508), and a computing warpgroup spills to memory.
#pragma once

#include "../instructions.cuh"

template <int REGISTERS>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// x, but the compiler no longer knows its value. So it computes descriptors from x where they are used. Otherwise it
// moves them out of the loop, and has no registers to keep them in.
__device__ inline uint32_t forget(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
