// TMA (tensor memory accelerator), a unit of each multiprocessor: one thread starts the copy of a whole tile.
//
// Loads. `load_tile` copies a box of a 4-D tensor, described by a tensor map (tensor_map.cuh), to shared memory. TMA
// computes all addresses, swizzles the rows (swizzle.cuh), and writes zeros for elements beyond the tensor's ends. It
// tells a Barrier how many bytes came. The thread that starts the copy has to `expect` them there.
//
// Stores. `store_tile` copies a tile in shared memory to a box of a tensor, and skips elements beyond the ends.
// `add_to_global` adds a run of float32 to global memory; the L2 cache does the additions, in any order. Both belong to
// the thread that starts them: it gathers them in groups with `commit_stores`, and waits for its groups:
//   - wait_until_stores_have_read(): their shared memory may be written again;
//   - wait_for_stores(): their results are in global memory.
//
// Two kinds of access. TMA and matrix products reach shared memory by another way (PTX: the async proxy) than ordinary
// loads and stores (the generic proxy). A barrier alone does not order the two: an ordinary store may still be on its
// way when TMA reads. So between ordinary stores and an asynchronous access of the same bytes stand
//   1. fence_async(), in each thread that wrote;
//   2. a barrier, if another thread starts the asynchronous access.
// In the other direction the wait for the asynchronous access is enough: a Barrier for loads, the waits above for
// stores, `wait_for_products` for matrix products.
#pragma once

#include "barriers.cuh"
#include "tensor_map.cuh"

__device__ inline void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Fill `to` with the box that starts at (batch, head, row, column).
__device__ inline void load_tile(uint32_t to, const TensorMap& map, Barrier barrier, int batch, int head, int row,
                                 int column) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier.address)
        : "memory");
}

// Fill `to` with `bytes` bytes from global memory. Both addresses and `bytes` are multiples of 16.
__device__ inline void load_bytes(uint32_t to, const void* from, int bytes, Barrier barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier.address)
        : "memory");
}

__device__ inline void store_tile(const TensorMap& map, uint32_t from, int batch, int head, int row, int column) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(head), "r"(batch), "r"(from)
                 : "memory");
}

// Add `bytes` bytes of float32 to global memory. Both addresses and `bytes` are multiples of 16.
__device__ inline void add_to_global(float* to, uint32_t from, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(from), "r"(bytes)
                 : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

__device__ inline void wait_until_stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
