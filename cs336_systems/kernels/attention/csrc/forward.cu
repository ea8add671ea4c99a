// FlashAttention-2, forward pass (Dao 2023, algorithm 1): a block computes O and the logsumexp of TILE queries.
#include "launch.cuh"
#include "tiles.cuh"

template <int HEAD>
struct Forward {
    static constexpr int STEP = ROW_SIZE <= 128 ? 64 : ROW_SIZE <= 512 ? 32 : 16;  // keys a step
    static constexpr int M = TILE == 128 ? 2 : 1;  // 16-row pieces a warp: two halve the reads of K and V per product
    // So many warps have the same rows, and each adds up some columns: O whole does not fit one's registers.
    static constexpr int SHARE = ROW_SIZE <= 512 ? 1 : 2, COLUMNS = HEAD / SHARE;
    static constexpr int WARPS = TILE / 16 / M * SHARE, THREADS = 32 * WARPS;
};

template <typename T, int HEAD>
__global__ void __launch_bounds__(Forward<HEAD>::THREADS)
    forward_kernel(Sizes sizes, View q_view, View k_view, View v_view, View o_view, float* logsumexp, float scale) {
    using Shape = Forward<HEAD>;
    constexpr int STEP = Shape::STEP, THREADS = Shape::THREADS, M = Shape::M;

    const int n_q = static_cast<int>(sizes.n_q), n_k = static_cast<int>(sizes.n_k);
    const int tiles = static_cast<int>(tiles_of(n_q));
    const int head = blockIdx.x / tiles;
    const int query0 = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * TILE;  // causal: the longest rows first
    const int warp = threadIdx.x / 32, warp_row = warp / Shape::SHARE * (16 * M), warp_query = query0 + warp_row;
    const int column0 = warp % Shape::SHARE * Shape::COLUMNS;  // of O that this warp adds up
    const int keys = sizes.is_causal ? min(n_k, query0 + TILE) : n_k;  // those beyond are hidden from the whole tile

    const Matrix<T> Q(q_view, sizes, head, n_q), K(k_view, sizes, head, n_k), V(v_view, sizes, head, n_k);
    const Tile<T, HEAD> q{shared_memory()};
    const auto k = q.from_row(TILE);  // two of K and of V: one is computed with while the other is filled
    const auto v = k.from_row(2 * STEP);
    const auto half = [](Tile<T, HEAD> both, int row) { return both.from_row(row / STEP % 2 * STEP); };

    load_rows<TILE, THREADS>(q, Q, query0);
    load_rows<STEP, THREADS>(k, K, 0);
    load_rows<STEP, THREADS>(v, V, 0);

    Accumulators<M, Shape::COLUMNS / 8> o;
    o.clear();
    float largest[M][2], sum[M][2];  // of each of this lane's rows; largest in units of log2, sum over this lane's part
#pragma unroll
    for (int i = 0; i < 2 * M; i++) largest[i / 2][i % 2] = -INFINITY, sum[i / 2][i % 2] = 0.0f;
    const float scale_log2 = scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s), and 2^x is one instruction

    for (int key0 = 0; key0 < keys; key0 += STEP) {
        wait_for_copies();
        __syncthreads();  // this step's tiles are there, and everybody is done with the other ones
        if (key0 + STEP < keys) {
            load_rows<STEP, THREADS>(half(k, key0 + STEP), K, key0 + STEP);
            load_rows<STEP, THREADS>(half(v, key0 + STEP), V, key0 + STEP);
        }
        if (warp_query >= n_q || (sizes.is_causal && key0 > warp_query + 16 * M - 1)) continue;  // nothing to see

        Accumulators<M, STEP / 8> s;
        s.clear();
        multiply_transposed(s, q, warp_row, half(k, key0));

        if (key0 + STEP > n_k || (sizes.is_causal && key0 + STEP - 1 > warp_query)) {
            const int row = warp_query + threadIdx.x % 32 / 4;
            s.for_each([&](float& x, int m, int h, int column) {
                const int last = sizes.is_causal ? min(row + 16 * m + 8 * h, n_k - 1) : n_k - 1;
                if (key0 + column > last) x = -INFINITY;
            });
        }

        // The online softmax: with a new maximum, the sums so far shrink by 2^(old - new).
        float top[M][2], shrink[M][2];
#pragma unroll
        for (int i = 0; i < 2 * M; i++) top[i / 2][i % 2] = -INFINITY;
        s.for_each([&](float& x, int m, int h, int) { top[m][h] = fmaxf(top[m][h], x); });
#pragma unroll
        for (int i = 0; i < 2 * M; i++) {
            const int m = i / 2, h = i % 2;
            const float before = largest[m][h];
            largest[m][h] = fmaxf(before, max_of_row(top[m][h]) * scale_log2);
            // A row with no finite score yet has the maximum -inf: -inf - -inf is no number, -inf - 0 gives 2^-inf = 0.
            top[m][h] = largest[m][h] == -INFINITY ? 0.0f : largest[m][h];
            shrink[m][h] = exp2_fast(before - top[m][h]);
            sum[m][h] *= shrink[m][h];
        }
        s.for_each([&](float& x, int m, int h, int) {
            x = exp2_fast(x * scale_log2 - top[m][h]);
            sum[m][h] += x;
        });
        o.for_each([&](float& x, int m, int h, int) { x *= shrink[m][h]; });
        multiply(o, s, half(v, key0).from_column(column0));
    }

    float inverse[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int m = i / 2, h = i % 2, row = warp_query + 16 * m + 8 * h + threadIdx.x % 32 / 4;
        const float total = sum_of_row(sum[m][h]);
        inverse[m][h] = 1.0f / total;
        if (row < n_q && threadIdx.x % 4 == 0)
            logsumexp[static_cast<int64_t>(head) * n_q + row] = (largest[m][h] + log2f(total)) * LN_2;
    }
    store_rows(Matrix<T>(o_view, sizes, head, n_q), warp_query, column0, o, inverse);
}

// logsumexp is (B, H, N_q), contiguous. Returns null or an error message.
extern "C" const char* flash_forward(const Sizes* sizes, const View* q, const View* k, const View* v, const View* o,
                                     float* logsumexp, void* stream) {
    using Shape = Forward<HEAD_SIZE>;
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(sizes->head_size)));
    const int64_t blocks = tiles_of(sizes->n_q) * sizes->batch * sizes->heads;
    return launch(forward_kernel<ELEMENT, HEAD_SIZE>, blocks, Shape::THREADS,
                  Tile<ELEMENT, HEAD_SIZE>::bytes(TILE + 4 * Shape::STEP), stream, *sizes, checked(*q, *sizes),
                  checked(*k, *sizes), checked(*v, *sizes), checked(*o, *sizes), logsumexp, scale);
}
