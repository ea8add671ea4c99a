// Shared by the kernels: tensors in global memory, tiles of them in shared memory, products of tiles in registers.
//
// The forward kernel and the two of the backward pass have one form. A block keeps tiles of TILE rows (forward:
// queries) and streams tiles of STEP rows (keys and values) past them. A warp owns 16 M of the TILE rows: it computes
// their scores, whose accumulators are just in the places in which the next product wants its left operand, so that
// probabilities never leave registers. One step's tiles are copied while the step before is computed.
//
// One library serves one type, ELEMENT (of float32 one way to multiply, EXACT or not), and head sizes up to HEAD_SIZE,
// a multiple of 16; the build defines them.
#pragma once

#include "problem.cuh"
#include "products.cuh"
#include "rows.cuh"

#include <cmath>

constexpr int CHUNK = 16 / sizeof(ELEMENT);  // elements in 16 bytes
constexpr int ROW_SIZE = HEAD_SIZE * sizeof(ELEMENT);
constexpr int TILE = ROW_SIZE <= 256 ? 128 : ROW_SIZE <= 512 ? 64 : 32;  // rows that a block keeps
__host__ __device__ constexpr int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }

inline View checked(View x, const Sizes& sizes) {
    // The stride of a dimension of one element is never used, and may be anything.
    const bool strides = x.row_stride % CHUNK == 0 && (sizes.batch == 1 || x.batch_stride % CHUNK == 0) &&
                         (sizes.heads == 1 || x.head_stride % CHUNK == 0);
    const bool chunks = x.column_stride == 1 && sizes.head_size % CHUNK == 0;
    x.vectorised = chunks && strides && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    return x;
}

// The (N, D) matrix of one batch entry and head. Offsets are 64-bit: a tensor may have more than 2^31 elements.
template <typename T>
struct Matrix {
    T* data;
    int64_t row_stride, column_stride;
    int rows, columns;
    bool vectorised;

    __device__ Matrix(const View& x, const Sizes& sizes, int head, int64_t n) {
        const int heads = static_cast<int>(sizes.heads);
        data = static_cast<T*>(x.data) + head / heads * x.batch_stride + head % heads * x.head_stride;
        row_stride = x.row_stride, column_stride = x.column_stride;
        rows = static_cast<int>(n), columns = static_cast<int>(sizes.head_size);
        vectorised = x.vectorised;
    }

    __device__ T* at(int row, int column) const { return data + row * row_stride + column * column_stride; }
};

// Rows of HEAD elements in shared memory, in chunks of 16 bytes: one lane passes ldmatrix the address of one chunk.
//
// Shared memory gives out 128 bytes at a time, from 32 banks of 4 bytes. ldmatrix reads a column of chunks, one chunk
// of each of 8 rows; were rows stored plainly, these would lie 128 bytes apart, in the same four banks, and take 8
// turns. So chunk c of row r is stored at place c ^ (r % 8): the 8 rows then use all 32 banks. Rows of 64 bytes, two
// of which share 128, have four places, and turn by one every second row.
template <typename T, int HEAD>
struct Tile {
    static constexpr int ROW = HEAD <= 32 ? 32 : HEAD <= 64 ? 64 : HEAD <= 128 ? 128 : 256;  // for the exclusive or
    static constexpr int ROW_BYTES = ROW * static_cast<int>(sizeof(T)), CHUNKS = ROW_BYTES / 16;

    uint32_t address;  // in shared memory

    __device__ uint32_t at(int row, int chunk) const {
        const int turn = ROW_BYTES == 64 ? row / 2 % 4 : row % 8;
        return address + row * ROW_BYTES + (chunk ^ turn) * 16;
    }

    // From the address of chunk 0 or 1 of a row to that `rows` rows, a multiple of 8, down and `chunks` chunks, an even
    // number, on. With constants it costs one exclusive or, and that only for chunks.
    __device__ static uint32_t moved(uint32_t from, int rows, int chunks) {
        return (from ^ chunks % 8 * 16) + chunks / 8 * 128 + rows * ROW_BYTES;
    }

    __device__ Tile from_row(int row) const { return {address + row * ROW_BYTES}; }

    // The columns from one on, a multiple of 8 chunks.
    __device__ Tile from_column(int column) const { return {address + column * static_cast<int>(sizeof(T))}; }

    __host__ __device__ static constexpr int bytes(int rows) { return rows * ROW_BYTES; }
};

// Start to fill ROWS rows of a tile with the rows of x from row0 on; elements outside of x become 0, which adds
// nothing to any product. Uses asynchronous copies if the addresses allow it, or goes element by element.
template <int ROWS, int THREADS, typename T, int HEAD>
__device__ inline void load_rows(Tile<T, HEAD> tile, const Matrix<T>& x, int row0) {
    constexpr int CHUNKS = Tile<T, HEAD>::CHUNKS;
    constexpr int CHUNKS_A_TURN = CHUNKS < THREADS / 8 ? CHUNKS : THREADS / 8;  // of a row
    constexpr int ROWS_A_TURN = THREADS / CHUNKS_A_TURN;
    static_assert(ROWS_A_TURN % 8 == 0 && ROWS % ROWS_A_TURN == 0);  // so a thread's rows are all swizzled alike
    const int first = threadIdx.x / CHUNKS_A_TURN;
    const int rows = x.rows - row0;  // of x, from row0 on
#pragma unroll
    for (int chunk0 = 0; chunk0 < CHUNKS; chunk0 += CHUNKS_A_TURN) {
        const int chunk = chunk0 + threadIdx.x % CHUNKS_A_TURN, column = chunk * CHUNK;
        const int columns = min(x.columns - column, CHUNK);  // of this thread's chunk
        if (column >= HEAD) return;
        uint32_t to = tile.at(first, chunk);
        if (x.vectorised) {
            const T* from = x.data + (row0 + first) * x.row_stride + column;
#pragma unroll
            for (int turn = 0; turn < ROWS / ROWS_A_TURN; turn++) {
                copy_async_16(to + turn * ROWS_A_TURN * Tile<T, HEAD>::ROW_BYTES, from,
                              first < rows - turn * ROWS_A_TURN && columns > 0);
                from += ROWS_A_TURN * x.row_stride;
            }
        } else {
#pragma unroll 1
            for (int row = first; row < ROWS; row += ROWS_A_TURN, to += ROWS_A_TURN * Tile<T, HEAD>::ROW_BYTES)
#pragma unroll 1
                for (int e = 0; e < CHUNK; e++)
                    shared_pointer<T>(to)[e] =
                        row < rows && e < columns ? *x.at(row0 + row, column + e) : from_float<T>(0.0f);
        }
    }
}

// Accumulators of 16 M x 8 N elements of a warp, in the places of `multiply_add_16`'s c.
template <int M, int N>
struct Accumulators {
    float of[M][N][4];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) of[m][n][e] = 0.0f;
    }

    // Call f(element, m, h, column): row 16 m + 8 h + lane / 4, column counted from the first of the accumulators.
    template <typename F>
    __device__ void for_each(F f) {
        const int column = threadIdx.x % 4 * 2;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) f(of[m][n][e], m, e / 2, 8 * n + column + e % 2);
    }
};

// c += A B^T over the head's elements: A is 16 M rows of the tile a, from row0 on, B the first 8 N rows of the tile b.
template <int M, int N, typename T, int HEAD>
__device__ inline void multiply_transposed(Accumulators<M, N>& c, Tile<T, HEAD> a, int row0, Tile<T, HEAD> b) {
    const int lane = threadIdx.x % 32;
    // The four matrices of A: rows 0-7 and 8-15 of chunk 2k, then of chunk 2k + 1.
    const uint32_t a_lane = a.at(row0 + lane % 16, lane / 16);
    // A row of b is a column of B^T, so no transposition. The four matrices: chunks 2k and 2k + 1 of rows 0-7, which
    // are b0 and b1 of product n, then of rows 8-15, for product n + 1.
    const uint32_t b_lane = b.at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll (std::is_same_v<T, float> ? 1 : HEAD)  // of float32 more would not fit the registers
    for (int k = 0; k < HEAD / (2 * CHUNK); k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(left[m], a.moved(a_lane, 16 * m, 2 * k));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4];
            load_matrices(right, b.moved(b_lane, 8 * n, 2 * k));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(c.of[m][n], left[m], right[0], right[1]);
                multiply_add<T>(c.of[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// c += P B: P is 16 M x 8 K in registers, rounded to T here, B 8 K x 8 N, from the first row and column of the tile b.
template <int M, int N, int K, typename T, int HEAD>
__device__ inline void multiply(Accumulators<M, N>& c, const Accumulators<M, K>& p, Tile<T, HEAD> b) {
    const int lane = threadIdx.x % 32;
    // The four matrices: rows 0-7 and 8-15 of chunk n, which are b0 and b1 of product n, then of chunk n + 1.
    const uint32_t b_lane = b.at(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        // Two 16 x 8 results side by side are one 16 x 16 left operand: compare c and a at `multiply_add_16`.
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                left[m][i] = pack<T>(p.of[m][k + i / 2][i % 2 * 2], p.of[m][k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4];
            load_matrices_transposed(right, b.moved(b_lane, 8 * k, n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(c.of[m][n], left[m], right[0], right[1]);
                multiply_add<T>(c.of[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// The same of float32. In which order products are added is free: where `multiply_add_tf32` has columns t and t + 4 of
// its left operand, this has 2t and 2t + 1, which p's lane holds, and of b the rows 2t and 2t + 1. No instruction
// transposes float32, so they are read one by one: rows 0, 2, 4 and 6 of two chunks are in 32 banks.
template <int M, int N, int K, int HEAD>
__device__ inline void multiply(Accumulators<M, N>& c, const Accumulators<M, K>& p, Tile<float, HEAD> b) {
    const int lane = threadIdx.x % 32, row = lane % 4 * 2, column = lane / 4;
    const uint32_t even = b.at(row, column / 4) + column % 4 * 4, odd = b.at(row + 1, column / 4) + column % 4 * 4;
#pragma unroll
    for (int k = 0; k < K; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) left[m][i] = __float_as_uint(p.of[m][k][i % 2 * 2 + i / 2]);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const uint32_t b0 = *shared_pointer<uint32_t>(b.moved(even, 8 * k, 2 * n));
            const uint32_t b1 = *shared_pointer<uint32_t>(b.moved(odd, 8 * k, 2 * n));
#pragma unroll
            for (int m = 0; m < M; m++) multiply_add<float>(c.of[m][n], left[m], b0, b1);
        }
    }
}

// Write a warp's rows, times factor[m][h], to rows row0 ... and columns column0 ... of x, except those outside of x.
template <int M, typename T, int N>
__device__ inline void store_rows(const Matrix<T>& x, int row0, int column0, const Accumulators<M, N>& c,
                                  const float (&factor)[M][2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = row0 + 16 * m + 8 * h + lane / 4;
            if (row >= x.rows) continue;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const int column = column0 + 8 * n + lane % 4 * 2;
                const float low = c.of[m][n][2 * h] * factor[m][h], high = c.of[m][n][2 * h + 1] * factor[m][h];
                if (column >= x.columns) break;
                if (x.vectorised) {
                    store_pair(x.data + row * x.row_stride + column, low, high);
                } else {
                    *x.at(row, column) = from_float<T>(low);
                    if (column + 1 < x.columns) *x.at(row, column + 1) = from_float<T>(high);
                }
            }
        }
}
