// FlashAttention for Hopper, backward pass: one walk over the queries gives dQ, dK and dV.
//
// With P = exp(S - logsumexp), dP = dO V^T, D = rowsum(dO O) and dS = P (dP - D), there are five products:
//
//     S = Q K^T      dP = dO V^T      dV += P^T dO      dK += dS^T Q      dQ += dS K
//
// A tile has TILE keys, and each of two warpgroups ROWS of them: it computes S and dP transposed, a row for each of its
// keys, so that P and dS are, in registers, the left operands of dV and dK, which stay in registers too. Tiles of
// QUERIES queries come by. dQ needs the dS of all keys: the warpgroups exchange it in shared memory, each computes half
// of the columns of dQ, and TMA adds it to sums in global memory, in float32. Blocks add in any order, so the last bits
// of dQ differ from run to run.
//
// Two things hide the waits, as in our Gluon kernel. dQ is one tile of queries late: when its product starts, the dS of
// the other warpgroup came long ago. And S and dP start from -logsumexp and -D instead of zero. In one turn:
//
//     products    S, dP ........ | dV ...... | dQ of the tile before, dK ..........
//     threads     (wait for S)   | P         | dS = P dP, store it   store dQ, TMA adds it
//
// Three kernels: `prepare` makes the starts and clears the sums, `gradients` is the walk, `finish` scales and rounds
// dQ.
#include "registers.cuh"
#include "swizzle.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "work.cuh"

#include "../launch.cuh"
#include "../rows.cuh"

namespace {

template <int HEAD>
struct Backward {
    static constexpr int GROUPS = 2, ROWS = 64, TILE = GROUPS * ROWS, QUERIES = 64, STAGES = 2;
    static constexpr int THREADS = 128 * (GROUPS + 1), REGISTERS = 240, LOADING_REGISTERS = 24;

    using Keys = SwizzledTile<TILE, HEAD>;         // and values, of both warpgroups
    using Queries = SwizzledTile<QUERIES, HEAD>;   // and dO
    using Scores = SwizzledTile<TILE, QUERIES>;    // dS, transposed
    using Gradients = SwizzledTile<ROWS, HEAD>;    // dK or dV of a warpgroup
    static constexpr int SUMS = QUERIES * HEAD / GROUPS;  // numbers of dQ that a warpgroup computes
    static constexpr int SUMS_BYTES = SUMS * 4, STARTS_BYTES = QUERIES * 4;
    static_assert(Gradients::BYTES == SUMS_BYTES);  // they go through the same memory

    static constexpr int KV_FULL = 0, KV_EMPTY = 1, FULL = 2, EMPTY = FULL + STAGES, DS = EMPTY + STAGES, NEXT = DS + 2;
    static constexpr int BARRIERS = NEXT + 2;
    static constexpr int SHARED_BYTES = 2 * Keys::BYTES + 2 * STAGES * Queries::BYTES + 2 * Scores::BYTES +
                                        GROUPS * SUMS_BYTES + 2 * STAGES * STARTS_BYTES + BARRIERS * Barrier::BYTES +
                                        2 * sizeof(int);

    // Shared memory, in this order.
    __device__ static Keys k() { return {shared_memory()}; }
    __device__ static Keys v() { return {k().address + Keys::BYTES}; }
    __device__ static Queries q(int step) { return {v().address + Keys::BYTES + step % STAGES * Queries::BYTES}; }
    __device__ static Queries d_o(int step) { return {q(0).address + (STAGES + step % STAGES) * Queries::BYTES}; }
    __device__ static Scores ds(int i) { return {q(0).address + 2 * STAGES * Queries::BYTES + i % 2 * Scores::BYTES}; }
    __device__ static uint32_t sums(int group) { return ds(0).address + 2 * Scores::BYTES + group * SUMS_BYTES; }
    __device__ static uint32_t s_starts(int step) { return sums(GROUPS) + step % STAGES * STARTS_BYTES; }
    __device__ static uint32_t dp_starts(int step) { return s_starts(0) + (STAGES + step % STAGES) * STARTS_BYTES; }
    __device__ static Barrier barrier(int i) {
        return {s_starts(0) + 2 * STAGES * STARTS_BYTES + i * Barrier::BYTES};
    }
    __device__ static uint32_t next_tile(int i) { return barrier(BARRIERS).address + i % 2 * 4; }

    __device__ static Barrier full(int step) { return barrier(FULL + step % STAGES); }
    __device__ static Barrier empty(int step) { return barrier(EMPTY + step % STAGES); }
    __device__ static Barrier ds_ready(int i) { return barrier(DS + i % 2); }
    __device__ static Barrier next_ready(int i) { return barrier(NEXT + i % 2); }
    __device__ static int parity(int step) { return step / STAGES & 1; }

    __device__ static int own(int group) { return 1 + group; }  // a named barrier
};

struct Parameters : Sizes32 {
    TensorMap q, k, v, d_o, dk, dv;
    const int* ends;  // (B, n_k): one more than the last query of each key's document; or null
    float* starts;    // (2, B, H, padded): -logsumexp / scale, -D; padded: n_q rounded up to tiles of queries
    float* sums;      // (B, H, padded / QUERIES, GROUPS, SUMS): dQ / scale, in the order of `sum_of`
    int* counter;     // tiles that were taken, not counting each block's first

    // One more than the last query that sees a key, as far as the band goes.
    __device__ int after_query(int batch, int key) const {
        key = min(key, n_k - 1);
        const int in_window = window < n_k - key ? key + window : INT_MAX;
        return ends == nullptr ? in_window : min(in_window, ends[static_cast<int64_t>(batch) * n_k + key]);
    }

    template <int HEAD>
    __device__ int64_t first_start(int batch_head, int tile) const {
        return (static_cast<int64_t>(batch_head) * blocks_of(n_q, Backward<HEAD>::QUERIES) + tile) *
               Backward<HEAD>::QUERIES;
    }
};

// A tile of keys, and the tiles of queries that see it, from `begin` to before `end`.
template <int HEAD>
struct Place {
    int batch, key_head, key0, begin, end;

    __device__ Place(const Parameters& x, int tile) {
        constexpr int TILE = Backward<HEAD>::TILE, QUERIES = Backward<HEAD>::QUERIES;
        const TileOf of(x, tile, blocks_of(x.n_k, TILE));
        batch = of.head / x.key_heads, key_head = of.head % x.key_heads;
        key0 = of.block * TILE;  // causal: the longest first
        end = blocks_of(min(x.n_q, x.after_query(batch, key0 + TILE - 1)), QUERIES);
        begin = x.is_causal ? min(key0 / QUERIES, end) : 0;
    }
};

// The loading thread. It brings tiles in the order in which they are read.
template <int HEAD>
__device__ inline void load(const Parameters& x) {
    using B = Backward<HEAD>;
    const int group = x.heads / x.key_heads;
    const int64_t to_dp = x.first_start<HEAD>(x.tiles / blocks_of(x.n_k, B::TILE) * group, 0);
    int step = 0;
    for (int tile = blockIdx.x, i = 0; tile < x.tiles; i++) {
        const Place<HEAD> place(x, tile);
        const Barrier kv_full = B::barrier(B::KV_FULL);
        B::barrier(B::KV_EMPTY).wait(i & 1 ^ 1);
        kv_full.expect(2 * B::Keys::BYTES);
        for (int c = 0; c < HEAD / 64; c++) {
            load_tile(B::k().block(c), x.k, kv_full, place.batch, place.key_head, place.key0, c * 64);
            load_tile(B::v().block(c), x.v, kv_full, place.batch, place.key_head, place.key0, c * 64);
        }
        for (int head = place.key_head * group; head < (place.key_head + 1) * group; head++)
            for (int t = place.begin; t < place.end; t++, step++) {
                const Barrier full = B::full(step);
                B::empty(step).wait(B::parity(step) ^ 1);
                full.expect(2 * (B::Queries::BYTES + B::STARTS_BYTES));
                for (int c = 0; c < HEAD / 64; c++) {
                    load_tile(B::q(step).block(c), x.q, full, place.batch, head, t * B::QUERIES, c * 64);
                    load_tile(B::d_o(step).block(c), x.d_o, full, place.batch, head, t * B::QUERIES, c * 64);
                }
                const float* starts = x.starts + x.first_start<HEAD>(place.batch * x.heads + head, t);
                load_bytes(B::s_starts(step), starts, B::STARTS_BYTES, full);
                load_bytes(B::dp_starts(step), starts + to_dp, B::STARTS_BYTES, full);
            }
        // The place for the number is free: the warpgroups read the one before the last, then gave back k and v.
        tile = gridDim.x + atomicAdd(x.counter, 1);
        *shared_pointer<int>(B::next_tile(i)) = tile;
        B::next_ready(i).arrive();
    }
}

// A warpgroup that computes: dK and dV of its keys in each tile, and its part of dQ.
template <typename T, int HEAD>
__device__ inline void compute(const Parameters& x, int group) {
    using B = Backward<HEAD>;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    const bool is_first = thread == 0;
    const float scale_log2 = x.scale * LOG2_E;
    const auto release = [&](Barrier empty) {
        if (lane == 0) empty.arrive();  // for the warp
    };
    const int row = group * B::ROWS + 16 * warp + lane / 4;  // of the tile: this thread's keys are row and row + 8
    // dS number i, i = 1 + step, is in place i % 2. Its first reader multiplies the dS before: zeros.
    const auto publish_ds = [&](int i, const uint32_t (&ds)[B::QUERIES / 16][4]) {
#pragma unroll
        for (int n = 0; n < B::QUERIES / 8; n++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                *shared_pointer<uint32_t>(B::ds(i).at(row + 8 * h, 8 * n + lane % 4 * 2)) = ds[n / 2][n % 2 * 2 + h];
        fence_async();
        __syncwarp();
        release(B::ds_ready(i));
    };
    uint32_t zeros[B::QUERIES / 16][4] = {};
    publish_ds(0, zeros);

    int step = 0;
    for (int tile = blockIdx.x, i = 0; tile < x.tiles; i++) {
        const Place<HEAD> place(x, tile);
        // This thread's keys h = 0, 1 are seen by the queries from[h] to before until[h], and all of the warpgroup's by
        // those from from_all to before until_all.
        int from[2], until[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int key = place.key0 + row + 8 * h;
            from[h] = x.is_causal ? key : 0;
            until[h] = key < x.n_k ? x.after_query(place.batch, key) : 0;
        }
        const int key0 = place.key0 + group * B::ROWS, last_key = key0 + B::ROWS - 1;
        const int from_all = x.is_causal ? last_key : 0;
        const int until_all = last_key < x.n_k ? x.after_query(place.batch, key0) : 0;

        float dk[HEAD / 2], dv[HEAD / 2];
#pragma unroll
        for (int e = 0; e < HEAD / 2; e++) dk[e] = dv[e] = 0.0f;
        float dq[HEAD / 4];

        const auto start_dq = [&](int i) {
            const typename B::Keys k{forget(B::k().address)};
            B::ds_ready(i).wait(i / 2 & 1);
            fence_registers();
#pragma unroll
            for (int n = 0; n < B::TILE / 16; n++)
                multiply_tiles<T, true, true>(dq, B::ds(i).along_rows(n), k.along_rows(n, group * (HEAD / 2)),
                                              n > 0);
            commit_products();
        };
        // Each thread writes four numbers at a time, in the order in which it has them.
        const auto add_dq = [&](int batch_head, int t) {
            if (is_first) wait_until_stores_have_read();
            meet(B::own(group), 128);
#pragma unroll
            for (int j = 0; j < HEAD / 16; j++)
                *shared_pointer<float4>(B::sums(group) + (j * 128 + thread) * 16) =
                    float4{dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
            fence_async();
            meet(B::own(group), 128);
            if (is_first) {
                const int64_t first = x.first_start<HEAD>(batch_head, t) * HEAD;
                add_to_global(x.sums + first + group * B::SUMS, B::sums(group), B::SUMS_BYTES);
                commit_stores();
            }
        };
        // Sums for 64 keys and the queries of a step that begin with a number for each query.
        const auto begin_with = [&](float(&c)[B::QUERIES / 2], uint32_t starts) {
#pragma unroll
            for (int n = 0; n < B::QUERIES / 8; n++) {
                const float2 pair = *shared_pointer<float2>(starts + (8 * n + lane % 4 * 2) * 4);
                c[4 * n] = c[4 * n + 2] = pair.x;
                c[4 * n + 1] = c[4 * n + 3] = pair.y;
            }
        };

        B::barrier(B::KV_FULL).wait(i & 1);
        const int heads = x.heads / x.key_heads;
        for (int head = place.key_head * heads; head < (place.key_head + 1) * heads; head++) {
            const int batch_head = place.batch * x.heads + head;
            for (int t = place.begin; t < place.end; t++, step++) {
                const int query0 = t * B::QUERIES;
                const typename B::Keys k{forget(B::k().address)}, v{forget(B::v().address)};
                float s[B::QUERIES / 2], dp[B::QUERIES / 2];
                uint32_t p[B::QUERIES / 16][4], ds[B::QUERIES / 16][4];
                B::full(step).wait(B::parity(step));
                begin_with(s, B::s_starts(step));
                begin_with(dp, B::dp_starts(step));
                claim(s), claim(dp);  // the numbers are there before the fence
                fence_registers();
#pragma unroll
                for (int d = 0; d < HEAD / 16; d++)
                    multiply_tiles<T, false, false>(s, k.along_columns(d, group * B::ROWS),
                                                    B::q(step).along_columns(d), true);
                commit_products();
                fence_registers();
#pragma unroll
                for (int d = 0; d < HEAD / 16; d++)
                    multiply_tiles<T, false, false>(dp, v.along_columns(d, group * B::ROWS),
                                                    B::d_o(step).along_columns(d), true);
                commit_products();

                wait_for_products<1>();
                claim(s);
#pragma unroll
                for (int e = 0; e < B::QUERIES / 2; e++) s[e] = exp2_fast(s[e] * scale_log2);
                // The mask comes after: where a hidden score is above the logsumexp, 2^x may be infinite.
                if (query0 < from_all || query0 + B::QUERIES > until_all) {
#pragma unroll
                    for (int e = 0; e < B::QUERIES / 2; e++) {
                        const int h = e / 2 % 2, query = query0 + e / 4 * 8 + lane % 4 * 2 + e % 2;
                        if (query < from[h] || query >= until[h]) s[e] = 0.0f;
                    }
                }
#pragma unroll
                for (int n = 0; n < B::QUERIES / 16; n++) operand<T>(p[n], s, n);
                fence_registers();
#pragma unroll
                for (int n = 0; n < B::QUERIES / 16; n++)
                    multiply_registers<T>(dv, p[n], B::d_o(step).along_rows(n), true);
                commit_products();

                wait_for_products<1>();
                claim(dp);
#pragma unroll
                for (int e = 0; e < B::QUERIES / 2; e++) dp[e] *= s[e];
#pragma unroll
                for (int n = 0; n < B::QUERIES / 16; n++) operand<T>(ds[n], dp, n);
                // Both warpgroups have finished the step before, so they have read the dS before the last.
                B::empty(step + 1).wait(B::parity(step + 1) ^ 1);
                publish_ds(step + 1, ds);
                start_dq(step);
                fence_registers();
#pragma unroll
                for (int n = 0; n < B::QUERIES / 16; n++)
                    multiply_registers<T>(dk, ds[n], B::q(step).along_rows(n), true);
                commit_products();

                wait_for_products<1>();
                claim(dq);
                claim(dv);
                if (t > place.begin) add_dq(batch_head, t - 1);
                wait_for_products<0>();
                claim(dk);
                release(B::empty(step));
            }
            if (place.end == place.begin) continue;
            start_dq(step);
            wait_for_products<0>();
            claim(dq);
            add_dq(batch_head, place.end - 1);
        }
        release(B::barrier(B::KV_EMPTY));

        const auto store = [&](const TensorMap& map, const float(&c)[HEAD / 2], float factor) {
            const typename B::Gradients to{B::sums(group)};
            if (is_first) wait_until_stores_have_read();
            meet(B::own(group), 128);
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    *shared_pointer<uint32_t>(to.at(16 * warp + 8 * h + lane / 4, 8 * n + lane % 4 * 2)) =
                        pack<T>(c[4 * n + 2 * h] * factor, c[4 * n + 2 * h + 1] * factor);
            fence_async();
            meet(B::own(group), 128);
            if (is_first) {
                for (int c = 0; c < HEAD / 64; c++)
                    store_tile(map, to.block(c), place.batch, place.key_head, key0, c * 64);
                commit_stores();
            }
        };
        B::next_ready(i).wait(i / 2 & 1);
        tile = *shared_pointer<int>(B::next_tile(i));
        store(x.dk, dk, x.scale);
        store(x.dv, dv, 1.0f);
    }
    if (is_first) wait_for_stores();
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(Backward<HEAD>::THREADS, 1)
    hopper_gradients_kernel(const __grid_constant__ Parameters parameters) {
    using B = Backward<HEAD>;
    if (threadIdx.x == 0) {
        B::barrier(B::KV_FULL).initialise(1), B::barrier(B::KV_EMPTY).initialise(4 * B::GROUPS);
        for (int i = 0; i < B::STAGES; i++) B::full(i).initialise(1), B::empty(i).initialise(4 * B::GROUPS);
        for (int i = 0; i < 2; i++) B::ds_ready(i).initialise(4 * B::GROUPS), B::next_ready(i).initialise(1);
        fence_async();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // so that the compiler knows it is one for a warp
    if (group == B::GROUPS) {
        give_registers<B::LOADING_REGISTERS>();
        if (threadIdx.x % 128 == 0) load<HEAD>(parameters);
    } else {
        take_registers<B::REGISTERS>();
        compute<T, HEAD>(parameters, group);
    }
}

// Four elements of a row, from a column on, a multiple of 4; zeros beyond the row.
template <typename T>
__device__ inline void read_four(float (&out)[4], const T* row, int column, int columns) {
    for (int e = 0; e < 4; e++) out[e] = column + e < columns ? to_float(row[column + e]) : 0.0f;
}

__device__ inline int64_t offset(const View& x, int batch, int head, int row) {
    return batch * x.batch_stride + head * x.head_stride + row * x.row_stride;
}

// The starts of QUERIES queries of a head, and zeros in their sums. A warp has a row at a time.
template <typename T, int HEAD>
__global__ void __launch_bounds__(128)
    hopper_prepare_kernel(const __grid_constant__ Parameters x, View o, View d_o, const float* logsumexp) {
    using B = Backward<HEAD>;
    const int tiles = blocks_of(x.n_q, B::QUERIES), tile = blockIdx.x % tiles, batch_head = blockIdx.x / tiles;
    const int batch = batch_head / x.heads, head = batch_head % x.heads, lane = threadIdx.x % 32;
    const int64_t first = x.first_start<HEAD>(batch_head, tile), to_dp = x.first_start<HEAD>(gridDim.x / tiles, 0);
    for (int row = threadIdx.x / 32; row < B::QUERIES; row += 4) {
        const int query = tile * B::QUERIES + row;
        float sum = 0.0f;
        if (query < x.n_q)
            for (int column = 4 * lane; column < HEAD; column += 128) {
                float a[4], b[4];
                read_four(a, static_cast<const T*>(o.data) + offset(o, batch, head, query), column, x.head_size);
                read_four(b, static_cast<const T*>(d_o.data) + offset(d_o, batch, head, query), column, x.head_size);
                for (int e = 0; e < 4; e++) sum += a[e] * b[e];
            }
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
        if (lane > 0) continue;
        // Beyond the last query the probabilities are 2^-inf = 0.
        const float l = query < x.n_q ? logsumexp[static_cast<int64_t>(batch_head) * x.n_q + query] : INFINITY;
        x.starts[first + row] = -l / x.scale;
        x.starts[to_dp + first + row] = -sum;
    }
    for (int i = threadIdx.x; i < B::QUERIES * HEAD / 4; i += 128)
        reinterpret_cast<float4*>(x.sums + first * HEAD)[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
    if (blockIdx.x == 0 && threadIdx.x == 0) *x.counter = 0;
}

// dq of QUERIES queries of a head. A thread reads the numbers that one of `compute` had.
template <typename T, int HEAD>
__global__ void __launch_bounds__(128) hopper_finish_kernel(const __grid_constant__ Parameters x, View dq) {
    using B = Backward<HEAD>;
    const int tiles = blocks_of(x.n_q, B::QUERIES), tile = blockIdx.x % tiles, batch_head = blockIdx.x / tiles;
    const int batch = batch_head / x.heads, head = batch_head % x.heads, lane = threadIdx.x % 32;
    const float* sums = x.sums + x.first_start<HEAD>(batch_head, tile) * HEAD;
    for (int i = 0; i < HEAD / 8; i++) {  // columns 8 i to 8 i + 7
        const float4 four = reinterpret_cast<const float4*>(sums)[i * 128 + threadIdx.x];
        for (int h = 0; h < 2; h++) {
            const int query = tile * B::QUERIES + threadIdx.x / 32 * 16 + 8 * h + lane / 4;
            const int column = 8 * i + lane % 4 * 2;
            if (query >= x.n_q || column >= x.head_size) continue;
            T* to = static_cast<T*>(dq.data) + offset(dq, batch, head, query) + column;
            const float low = (h == 0 ? four.x : four.z) * x.scale, high = (h == 0 ? four.y : four.w) * x.scale;
            if (column + 1 < x.head_size)
                *reinterpret_cast<uint32_t*>(to) = pack<T>(low, high);
            else
                *to = from_float<T>(low);
        }
    }
}

}  // namespace

// o, d_o and dq have q's sizes, dk and dv those of k; rows of all begin at multiples of 16 bytes. logsumexp is (B, H,
// n_q), ends is (B, n_k) or null, starts and sums are as in Parameters. Returns null or an error message.
extern "C" const char* hopper_backward(const Problem* problem, const View* q, const View* k, const View* v,
                                       const View* o, const View* d_o, const View* dq, const View* dk, const View* dv,
                                       const float* logsumexp, const int* ends, float* starts, float* sums,
                                       int* counter, void* stream) {
    using B = Backward<HEAD_SIZE>;
    const Problem& p = *problem;
    const int64_t tiles = (p.n_k + B::TILE - 1) / B::TILE * p.batch * p.key_heads;
    const int64_t rows = (p.n_q + B::QUERIES - 1) / B::QUERIES * p.batch * p.heads;
    if (tiles > INT_MAX - p.blocks) return "the problem has more tiles than a 32-bit number counts";
    Parameters x{Sizes32(p, tiles)};
    const auto map = [&](TensorMap& map, const View* view, int64_t heads, int64_t n, int rows) {
        return make_tensor_map<ELEMENT>(map, *view, p.batch, heads, n, p.head_size, rows);
    };
    const char* error = map(x.q, q, p.heads, p.n_q, B::QUERIES);
    if (error == nullptr) error = map(x.d_o, d_o, p.heads, p.n_q, B::QUERIES);
    if (error == nullptr) error = map(x.k, k, p.key_heads, p.n_k, B::TILE);
    if (error == nullptr) error = map(x.v, v, p.key_heads, p.n_k, B::TILE);
    if (error == nullptr) error = map(x.dk, dk, p.key_heads, p.n_k, B::ROWS);
    if (error == nullptr) error = map(x.dv, dv, p.key_heads, p.n_k, B::ROWS);
    if (error != nullptr) return error;
    x.ends = ends, x.starts = starts, x.sums = sums, x.counter = counter;
    error = launch(hopper_prepare_kernel<ELEMENT, HEAD_SIZE>, rows, 128, 0, stream, x, *o, *d_o, logsumexp);
    if (error == nullptr)
        error = launch(hopper_gradients_kernel<ELEMENT, HEAD_SIZE>, tiles < p.blocks ? tiles : p.blocks, B::THREADS,
                       B::SHARED_BYTES, stream, x);
    if (error == nullptr) error = launch(hopper_finish_kernel<ELEMENT, HEAD_SIZE>, rows, 128, 0, stream, x, *dq);
    return error;
}
