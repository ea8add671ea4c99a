// Moving registers from warps that copy to warps that compute.
//
// A block is launched with the same number of registers for each thread: 65,536 divided by the threads, 168 for 384 of
// them. A warpgroup that keeps 64 rows of scores and of the output in registers needs more, a warp that only starts
// copies needs few. `setmaxnreg` changes the number for the executing warpgroup while the kernel runs: `give_registers`
// returns some to the block, `take_registers` waits until the block has enough.
//
//     threads of the block    at launch    loading    computing
//     384 = 3 warpgroups      168          24         240, 240           3 x 168 = 504 = 24 + 2 x 240
//     512 = 4 warpgroups      128          32         160, 160, 160      4 x 128 = 512 = 32 + 3 x 160
//
// The compiler (ptxas) allocates up to these numbers in the code that follows, under four conditions:
//   - the kernel says how many threads a block has, and that one block a multiprocessor is enough:
//     __launch_bounds__(threads, 1), so that the number at launch is fixed;
//   - all four warps of the warpgroup execute the instruction;
//   - numbers are multiples of 8, from 24 to 240;
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

// x, of which the compiler knows nothing: so it computes descriptors from it where they are used. Otherwise it computes
// all that are the same in each turn of a loop before the loop, and has no registers to keep them in.
__device__ inline uint32_t forget(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}
