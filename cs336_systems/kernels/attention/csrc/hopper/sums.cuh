// Before and after the walk of the backward pass: `prepare` and `finish`.
//
// Blocks add their parts of dQ in global memory, in float32. It is divided into squares of 64 queries and 64 columns.
// The numbers of a square are in the order in which the threads of a warpgroup have them (wgmma.cuh), so that threads
// write 16 bytes at a time:
//
//     four[n][t]    c[4 n] to c[4 n + 3] of thread t: rows r and r + 8, columns 8 n + 2 (t % 4) and the next one
//
// where r = t / 32 * 16 + t % 32 / 4. A head's squares are (padded / 64, HEAD / 64).
#pragma once

#include "backward.cuh"

// Eight elements of a row. Rows begin at multiples of 16 bytes.
template <typename T>
struct alignas(16) Eight {
    T x[8];
};

// The eight elements from `column` on, a multiple of 8. Beyond the row's end they are zeros.
template <typename T>
__device__ inline Eight<T> read_eight(const T* row, int column, int columns) {
    Eight<T> eight;
    if (column + 8 <= columns) return *reinterpret_cast<const Eight<T>*>(row + column);
#pragma unroll
    for (int e = 0; e < 8; e++) eight.x[e] = column + e < columns ? row[column + e] : from_float<T>(0.0f);
    return eight;
}

template <typename T>
__device__ inline void write_eight(T* row, int column, int columns, const Eight<T>& eight) {
    if (column + 8 <= columns) {
        *reinterpret_cast<Eight<T>*>(row + column) = eight;
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (column + e < columns) row[column + e] = eight.x[e];
}

template <typename T>
__device__ inline T* row_of(const View& x, int batch, int head, int row) {
    return static_cast<T*>(x.data) + batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
}

// -logsumexp / scale and -D of a tile's queries, and zeros in their sums. HEAD / 8 lanes have a row at a time.
template <typename T, int HEAD>
__global__ void __launch_bounds__(128)
    hopper_prepare_kernel(const __grid_constant__ Parameters x, View o, View d_o, const float* logsumexp) {
    using B = Backward<HEAD>;
    constexpr int LANES = HEAD / 8;
    const int tiles = ceil_div(x.n_q, B::QUERIES), tile = blockIdx.x % tiles, batch_head = blockIdx.x / tiles;
    const int batch = batch_head / x.heads, head = batch_head % x.heads, lane = threadIdx.x % LANES;
    const int64_t first = x.padded_row<HEAD>(batch_head, tile), to_dp = x.padded_row<HEAD>(gridDim.x / tiles, 0);
    for (int row = threadIdx.x / LANES; row < B::QUERIES; row += 128 / LANES) {
        const int query = tile * B::QUERIES + row;
        float sum = 0.0f;
        if (query < x.n_q) {
            const auto a = read_eight(row_of<T>(o, batch, head, query), 8 * lane, x.head_size);
            const auto b = read_eight(row_of<T>(d_o, batch, head, query), 8 * lane, x.head_size);
            for (int e = 0; e < 8; e++) sum += to_float(a.x[e]) * to_float(b.x[e]);
        }
        for (int distance = LANES / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xffffffff, sum, distance);
        if (lane > 0) continue;
        // Beyond the last query, probabilities shall be 2^-inf = 0.
        const float l = query < x.n_q ? logsumexp[static_cast<int64_t>(batch_head) * x.n_q + query] : INFINITY;
        x.initial[first + row] = -l / x.scale;
        x.initial[to_dp + first + row] = -sum;
    }
    for (int i = threadIdx.x; i < B::QUERIES * HEAD / 4; i += 128)
        reinterpret_cast<float4*>(x.sums + first * HEAD)[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    if (blockIdx.x == 0 && threadIdx.x == 0) *x.counter = 0;
}

// dq of a tile's queries. A thread reads the numbers that four neighbouring threads have written: eight columns of two
// rows.
template <typename T, int HEAD>
__global__ void __launch_bounds__(128) hopper_finish_kernel(const __grid_constant__ Parameters x, View dq) {
    using B = Backward<HEAD>;
    const int tiles = ceil_div(x.n_q, B::QUERIES), tile = blockIdx.x % tiles, batch_head = blockIdx.x / tiles;
    const int batch = batch_head / x.heads, head = batch_head % x.heads;
    const auto four = reinterpret_cast<const float4*>(x.sums + x.padded_row<HEAD>(batch_head, tile) * HEAD);
    for (int i = threadIdx.x; i < B::QUERIES / 2 * HEAD / 8; i += 128) {
        const int n = i % (HEAD / 8), pair = i / (HEAD / 8), square = pair / 32;
        const int query = tile * B::QUERIES + square * 64 + pair % 32 / 8 * 16 + pair % 8;
        Eight<T> eight[2];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float4 c = four[square * (HEAD / 64) * B::SUMS / 4 + n * 128 + pair % 32 * 4 + t];
            eight[0].x[2 * t] = from_float<T>(c.x * x.scale), eight[0].x[2 * t + 1] = from_float<T>(c.y * x.scale);
            eight[1].x[2 * t] = from_float<T>(c.z * x.scale), eight[1].x[2 * t + 1] = from_float<T>(c.w * x.scale);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (query + 8 * h < x.n_q)
                write_eight(row_of<T>(dq, batch, head, query + 8 * h), 8 * n, x.head_size, eight[h]);
    }
}
