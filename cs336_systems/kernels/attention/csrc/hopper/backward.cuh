// Shared by the three kernels of the backward pass: tile sizes, shared memory, the problem.
#pragma once

#include "registers.cuh"
#include "swizzle.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "work.cuh"

#include "../launch.cuh"
#include "../rows.cuh"

template <int HEAD>
struct Backward {
    static constexpr int GROUPS = 2, ROWS = 64, TILE = GROUPS * ROWS, STAGES = 2;
    static constexpr int HALF = 64, HALVES = HEAD == 64 ? 2 : 1, QUERIES = HALVES * HALF;
    static constexpr int WARPS = 4 * GROUPS;  // that compute
    static constexpr int THREADS = 128 * (GROUPS + 1), REGISTERS = 240, LOADING_REGISTERS = 24;

    using Keys = SwizzledTile<TILE, HEAD>;        // and values, of both warpgroups
    using Queries = SwizzledTile<QUERIES, HEAD>;  // and dO
    using Scores = SwizzledTile<TILE, QUERIES>;   // dS, transposed
    using Gradients = SwizzledTile<ROWS, HEAD>;   // dK or dV of a warpgroup
    static constexpr int SUMS = 64 * 64;          // a square of dQ: a tile of queries has two, one for each warpgroup
    static constexpr int SUMS_BYTES = SUMS * 4, INITIAL_BYTES = QUERIES * 4;
    static_assert(GROUPS * SUMS == QUERIES * HEAD);
    static_assert(Gradients::BYTES <= SUMS_BYTES);  // both go through the same memory

    static constexpr int KV_FULL = 0, KV_EMPTY = 1, FULL = 2, EMPTY = FULL + STAGES, DS = EMPTY + STAGES;
    static constexpr int NEXT = DS + 2 * STAGES, BARRIERS = NEXT + 2;
    static constexpr int SHARED_BYTES = 2 * Keys::BYTES + 2 * STAGES * Queries::BYTES + STAGES * Scores::BYTES +
                                        GROUPS * SUMS_BYTES + 2 * STAGES * INITIAL_BYTES + BARRIERS * Barrier::BYTES +
                                        2 * sizeof(int);

    // Shared memory, in this order.
    __device__ static Keys k() { return {shared_memory()}; }
    __device__ static Keys v() { return {k().address + Keys::BYTES}; }
    __device__ static Queries q(uint32_t step) { return {v().address + Keys::BYTES + step % STAGES * Queries::BYTES}; }
    __device__ static Queries d_o(uint32_t step) { return {q(0).address + (STAGES + step % STAGES) * Queries::BYTES}; }
    __device__ static Scores ds(uint32_t step) {
        return {q(0).address + 2 * STAGES * Queries::BYTES + step % STAGES * Scores::BYTES};
    }
    __device__ static uint32_t sums(int group) { return ds(0).address + STAGES * Scores::BYTES + group * SUMS_BYTES; }
    __device__ static uint32_t s_initial(uint32_t step) { return sums(GROUPS) + step % STAGES * INITIAL_BYTES; }
    __device__ static uint32_t dp_initial(uint32_t step) { return s_initial(step) + STAGES * INITIAL_BYTES; }
    __device__ static Barrier barrier(int i) {
        return {s_initial(0) + 2 * STAGES * INITIAL_BYTES + i * Barrier::BYTES};
    }
    __device__ static uint32_t next_tile(int i) { return barrier(BARRIERS).address + i % 2 * 4; }

    __device__ static Barrier kv_full() { return barrier(KV_FULL); }
    __device__ static Barrier kv_empty() { return barrier(KV_EMPTY); }
    __device__ static Barrier full(uint32_t step) { return barrier(FULL + step % STAGES); }
    __device__ static Barrier empty(uint32_t step) { return barrier(EMPTY + step % STAGES); }
    // Of a buffer of dS: both warpgroups have written their rows; both have finished the product that reads it.
    __device__ static Barrier ds_full(uint32_t step) { return barrier(DS + step % STAGES); }
    __device__ static Barrier ds_empty(uint32_t step) { return barrier(DS + STAGES + step % STAGES); }
    __device__ static Barrier next_ready(int i) { return barrier(NEXT + i % 2); }
    __device__ static int parity(uint32_t step) { return step / STAGES & 1; }

    // The named barrier where a warpgroup's own four warps meet.
    __device__ static int own(int group) { return 1 + group; }
};

struct Parameters : Sizes32 {
    TensorMap q, k, v, d_o, dk, dv;
    const int* ends;  // (B, n_k): one more than the last query of each key's document; or null
    float* initial;   // (2, B, H, padded): -logsumexp / scale, -D; padded: n_q rounded up to whole tiles of queries
    float* sums;      // dQ / scale in squares: see sums.cuh
    int* counter;     // tiles that blocks have taken, not counting each block's first

    // One more than the last query that sees a key, by the band alone.
    __device__ int after_query(int batch, int key) const {
        key = min(key, n_k - 1);
        const int in_window = window < n_k - key ? key + window : INT_MAX;
        return ends == nullptr ? in_window : min(in_window, ends[static_cast<int64_t>(batch) * n_k + key]);
    }

    // The first row of a tile of queries in a tensor (B, H, padded).
    template <int HEAD>
    __device__ int64_t padded_row(int batch_head, int tile) const {
        return (static_cast<int64_t>(batch_head) * ceil_div(n_q, Backward<HEAD>::QUERIES) + tile) *
               Backward<HEAD>::QUERIES;
    }
};
