// Waiting on Hopper: barriers in shared memory that count bytes too, and numbered barriers for some of a block's warps.
//
// A Barrier (PTX: mbarrier) is an 8-byte object in shared memory. It goes from phase to phase. A phase is complete when
//   - as many arrivals as `initialise` said have come, and
//   - all bytes have come that `expect` announced. TMA (tma.cuh) counts them down by itself.
// Then the next phase begins, with the same number of arrivals to come. So one barrier serves every use of a buffer.
//
// A wait names a phase by its parity: wait(p) returns once the latest phase of parity p is complete. With phases
// counted from 0, the n-th has parity n & 1. A barrier that has completed no phase yet counts the one "before the
// first", of parity 1, as complete: wait(1) returns at once. So the loading thread needs no special case for the first
// use of an empty buffer.
//
// A ring of STAGES buffers has two barriers for each of them:
//
//     full    the loading thread expects the bytes, TMA brings them; the warps that read wait for it
//     empty   each warp that has read the buffer arrives; the loading thread waits for it before the next load
//
//     step                  0         1         2         3         4            (STAGES = 2)
//     buffer                0         1         0         1         0
//     full: wait for parity 0         0         1         1         0            step / STAGES & 1
//     empty: wait for       1         1         0         0         1            the same, ^ 1: the use before
//
// An arrival releases and a wait acquires: reads and writes before the arrival are complete for threads that waited.
// Bytes that TMA wrote are visible to all threads that have waited for the barrier, and to their matrix products.
//
// A named barrier (PTX: bar.sync, bar.arrive) is one of sixteen in hardware, 0 being __syncthreads(). `threads` of them
// meet there: those that `meet` wait until all have come, those that `arrive` go on. They cost less than a Barrier and
// cannot count bytes. The warpgroups take turns with them: see forward.cu.
#pragma once

#include "../instructions.cuh"

struct Barrier {
    static constexpr int BYTES = 8;

    uint32_t address;

    // For one thread. Others may use the barrier after fence_async() (tma.cuh) and __syncthreads().
    __device__ void initialise(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals) : "memory");
    }

    __device__ void arrive() const {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }

    // One arrival, and `bytes` that the phase has to wait for.
    __device__ void expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
    }

    __device__ void wait(int parity) const {
        uint32_t done = 0;
        while (!done)  // each try sleeps for a while by itself
            asm volatile(
                "{ .reg .pred done;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                "selp.u32 %0, 1, 0, done; }"
                : "=r"(done)
                : "r"(address), "r"(parity)
                : "memory");
    }
};

__device__ inline void meet(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ inline void arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
