// FlashAttention-2, backward pass (Dao 2023, algorithm 2), in three kernels, so that every gradient is written by one
// block, in one order: no atomic additions, and the same bits every time.
//
//   row_statistics   D_i = sum_d dO_id O_id for each query, beside its logsumexp;
//   key_gradients    a block keeps TILE keys and streams queries:  dV = P^T dO,  dK = dS^T Q;
//   query_gradients  a block keeps TILE queries and streams keys:  dQ = dS K.
//
// With P = exp(S - logsumexp), dP = dO V^T and dS = P (dP - D); P and dP are computed in both of the last two kernels,
// which makes 7 products where one kernel with atomic additions to dQ would do 5.
#include "launch.cuh"
#include "tiles.cuh"

struct Statistics {
    float logsumexp_log2, D;  // logsumexp in units of log2: P = 2^(scale_log2 S - logsumexp_log2)
};

constexpr int STATISTICS_THREADS = 2 * TILE;  // a warp for each 16 rows

// D is the diagonal of dO O^T. Summed by the same instructions as dP = dO V^T, it has the same rounding errors, which
// cancel in dP - D where one key has all the weight; that the rest of each 16 x 16 is for nothing hardly shows.
template <typename T, int HEAD>
__global__ void __launch_bounds__(STATISTICS_THREADS)
    row_statistics(Sizes sizes, View o_view, View do_view, const float* logsumexp, Statistics* statistics) {
    const int n_q = static_cast<int>(sizes.n_q), tiles = static_cast<int>(tiles_of(n_q));
    const int head = blockIdx.x / tiles, query0 = static_cast<int>(blockIdx.x) % tiles * TILE;
    const int warp_row = threadIdx.x / 32 * 16;

    const Tile<T, HEAD> o{shared_memory()};
    const auto d_o = o.from_row(TILE);
    load_rows<TILE, STATISTICS_THREADS>(o, Matrix<T>(o_view, sizes, head, n_q), query0);
    load_rows<TILE, STATISTICS_THREADS>(d_o, Matrix<T>(do_view, sizes, head, n_q), query0);
    wait_for_copies();
    __syncthreads();

    Accumulators<1, 2> products;
    products.clear();
    multiply_transposed(products, d_o, warp_row, o.from_row(warp_row));
    products.for_each([&](float& x, int, int h, int column) {
        const int row = 8 * h + threadIdx.x % 32 / 4, query = query0 + warp_row + row;
        const int64_t i = static_cast<int64_t>(head) * n_q + query;
        if (column == row && query < n_q) statistics[i] = {logsumexp[i] * LOG2_E, x};
    });
}

template <int HEAD>
struct Backward {
    static constexpr int STEP = TILE >= 64 ? TILE / 4 : 16;     // rows a step
    static constexpr int M = CHUNK == 8 && HEAD <= 64 ? 2 : 1;  // 16-row pieces a warp: as many as registers hold
    // So many warps have the same rows, and each adds up some columns: both gradients whole do not fit one's registers.
    static constexpr int SHARE = HEAD % 128 == 0 ? HEAD / (16 * CHUNK) : 1, COLUMNS = HEAD / SHARE;
    static constexpr int WARPS = TILE / 16 / M * SHARE, THREADS = 32 * WARPS;
};

// Warps own keys, so all is transposed: S^T = K Q^T and dP^T = V dO^T have a row for each key and a column for each
// query.
template <typename T, int HEAD>
__global__ void __launch_bounds__(Backward<HEAD>::THREADS)
    key_gradients(Sizes sizes, View q_view, View k_view, View v_view, View do_view, View dk_view, View dv_view,
                  const Statistics* all_statistics, float scale) {
    using Shape = Backward<HEAD>;
    constexpr int STEP = Shape::STEP, THREADS = Shape::THREADS, M = Shape::M;

    const int n_q = static_cast<int>(sizes.n_q), n_k = static_cast<int>(sizes.n_k);
    const int tiles = static_cast<int>(tiles_of(n_k));
    const int head = blockIdx.x / tiles;
    const int key0 = static_cast<int>(blockIdx.x) % tiles * TILE;  // causal: the keys that most queries see first
    const int warp = threadIdx.x / 32, warp_row = warp / Shape::SHARE * (16 * M), warp_key = key0 + warp_row;
    const int column0 = warp % Shape::SHARE * Shape::COLUMNS;  // of the gradients that this warp adds up
    const int first_query = sizes.is_causal ? key0 : 0;  // those before see no key of the tile

    const Matrix<T> Q(q_view, sizes, head, n_q), dO(do_view, sizes, head, n_q);
    const Tile<T, HEAD> k{shared_memory()};
    const auto v = k.from_row(TILE);
    const auto q = v.from_row(TILE);  // two of Q, dO and statistics: one is computed with while the other is filled
    const auto d_o = q.from_row(2 * STEP);
    const uint32_t statistics = d_o.from_row(2 * STEP).address;
    const auto statistics_of = [=](int query) {
        return statistics + query % (2 * STEP) * static_cast<uint32_t>(sizeof(Statistics));
    };
    const auto half = [](Tile<T, HEAD> both, int row) { return both.from_row(row / STEP % 2 * STEP); };
    const auto load_step = [&](int query0) {
        load_rows<STEP, THREADS>(half(q, query0), Q, query0);
        load_rows<STEP, THREADS>(half(d_o, query0), dO, query0);
        if (threadIdx.x < STEP) {
            const int query = query0 + threadIdx.x;
            const Statistics* from = all_statistics + static_cast<int64_t>(head) * n_q + (query < n_q ? query : 0);
            copy_async_8(statistics_of(query), from, query < n_q);
        }
    };

    load_rows<TILE, THREADS>(k, Matrix<T>(k_view, sizes, head, n_k), key0);
    load_rows<TILE, THREADS>(v, Matrix<T>(v_view, sizes, head, n_k), key0);
    load_step(first_query);

    Accumulators<M, Shape::COLUMNS / 8> dk, dv;
    dk.clear(), dv.clear();
    const float scale_log2 = scale * LOG2_E;

    for (int query0 = first_query; query0 < n_q; query0 += STEP) {
        wait_for_copies();
        __syncthreads();  // this step's tiles are there, and everybody is done with the other ones
        if (query0 + STEP < n_q) load_step(query0 + STEP);
        if (warp_key >= n_k || (sizes.is_causal && query0 + STEP - 1 < warp_key)) continue;  // nothing to see

        Accumulators<M, STEP / 8> s, dp;
        s.clear();
        multiply_transposed(s, k, warp_row, half(q, query0));
        dp.clear();
        multiply_transposed(dp, v, warp_row, half(d_o, query0));

        // Keys beyond the last need no mask: their rows are never written.
        if (query0 + STEP > n_q || (sizes.is_causal && query0 < warp_key + 16 * M - 1)) {
            const int row = warp_key + threadIdx.x % 32 / 4;
            s.for_each([&](float& x, int m, int h, int column) {
                const int first = sizes.is_causal ? row + 16 * m + 8 * h : 0, query = query0 + column;
                if (query < first || query >= n_q) x = -INFINITY;
            });
        }

        const int first = threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < STEP / 8; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const Statistics of_query = *shared_pointer<Statistics>(statistics_of(query0 + 8 * n + first + c));
#pragma unroll
                for (int i = 0; i < 2 * M; i++) {
                    float &p = s.of[i / 2][n][i % 2 * 2 + c], &ds = dp.of[i / 2][n][i % 2 * 2 + c];
                    p = exp2_fast(p * scale_log2 - of_query.logsumexp_log2);
                    ds = p * (ds - of_query.D);
                }
            }
        multiply(dv, s, half(d_o, query0).from_column(column0));
        multiply(dk, dp, half(q, query0).from_column(column0));
    }
    wait_for_copies();  // where there was no step, some are still under way

    float one[M][2], scales[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) one[i / 2][i % 2] = 1.0f, scales[i / 2][i % 2] = scale;
    store_rows(Matrix<T>(dv_view, sizes, head, n_k), warp_key, column0, dv, one);
    store_rows(Matrix<T>(dk_view, sizes, head, n_k), warp_key, column0, dk, scales);
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(Backward<HEAD>::THREADS)
    query_gradients(Sizes sizes, View q_view, View k_view, View v_view, View do_view, View dq_view,
                    const Statistics* all_statistics, float scale) {
    using Shape = Backward<HEAD>;
    constexpr int STEP = Shape::STEP, THREADS = Shape::THREADS, M = Shape::M;

    const int n_q = static_cast<int>(sizes.n_q), n_k = static_cast<int>(sizes.n_k);
    const int tiles = static_cast<int>(tiles_of(n_q));
    const int head = blockIdx.x / tiles;
    const int query0 = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * TILE;  // causal: the longest rows first
    const int warp = threadIdx.x / 32, warp_row = warp / Shape::SHARE * (16 * M), warp_query = query0 + warp_row;
    const int column0 = warp % Shape::SHARE * Shape::COLUMNS;  // of the gradient that this warp adds up
    const int keys = sizes.is_causal ? min(n_k, query0 + TILE) : n_k;  // those beyond are hidden from the whole tile

    const Matrix<T> K(k_view, sizes, head, n_k), V(v_view, sizes, head, n_k);
    const Tile<T, HEAD> q{shared_memory()};
    const auto d_o = q.from_row(TILE);
    const auto k = d_o.from_row(TILE);  // two of K and of V: one is computed with while the other is filled
    const auto v = k.from_row(2 * STEP);
    const auto half = [](Tile<T, HEAD> both, int row) { return both.from_row(row / STEP % 2 * STEP); };
    const auto load_step = [&](int key0) {
        load_rows<STEP, THREADS>(half(k, key0), K, key0);
        load_rows<STEP, THREADS>(half(v, key0), V, key0);
    };

    load_rows<TILE, THREADS>(q, Matrix<T>(q_view, sizes, head, n_q), query0);
    load_rows<TILE, THREADS>(d_o, Matrix<T>(do_view, sizes, head, n_q), query0);
    load_step(0);

    Accumulators<M, Shape::COLUMNS / 8> dq;
    dq.clear();
    Statistics statistics[M][2];  // of each of this lane's rows
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const int row = warp_query + 8 * i + threadIdx.x % 32 / 4;
        statistics[i / 2][i % 2] = all_statistics[static_cast<int64_t>(head) * n_q + min(row, n_q - 1)];
    }
    const float scale_log2 = scale * LOG2_E;

    for (int key0 = 0; key0 < keys; key0 += STEP) {
        wait_for_copies();
        __syncthreads();  // this step's tiles are there, and everybody is done with the other ones
        if (key0 + STEP < keys) load_step(key0 + STEP);
        if (warp_query >= n_q || (sizes.is_causal && key0 > warp_query + 16 * M - 1)) continue;  // nothing to see

        Accumulators<M, STEP / 8> s, dp;
        s.clear();
        multiply_transposed(s, q, warp_row, half(k, key0));
        dp.clear();
        multiply_transposed(dp, d_o, warp_row, half(v, key0));

        // Queries beyond the last need no mask: their rows are never written.
        if (key0 + STEP > n_k || (sizes.is_causal && key0 + STEP - 1 > warp_query)) {
            const int row = warp_query + threadIdx.x % 32 / 4;
            s.for_each([&](float& x, int m, int h, int column) {
                const int last = sizes.is_causal ? min(row + 16 * m + 8 * h, n_k - 1) : n_k - 1;
                if (key0 + column > last) x = -INFINITY;
            });
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const Statistics of_query = statistics[m][e / 2];
                    const float p = exp2_fast(s.of[m][n][e] * scale_log2 - of_query.logsumexp_log2);
                    dp.of[m][n][e] = p * (dp.of[m][n][e] - of_query.D);  // now dS
                }
        multiply(dq, dp, half(k, key0).from_column(column0));
    }

    float scales[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) scales[i / 2][i % 2] = scale;
    store_rows(Matrix<T>(dq_view, sizes, head, n_q), warp_query, column0, dq, scales);
}

// statistics: room for (B, H, N_q) pairs of float32. dq, or dk and dv, may be null: then they are not computed.
// Returns null or an error message.
extern "C" const char* flash_backward(const Sizes* sizes, const View* q, const View* k, const View* v, const View* o,
                                      const View* d_o, const float* logsumexp, Statistics* statistics, const View* dq,
                                      const View* dk, const View* dv, void* stream) {
    using Shape = Backward<HEAD_SIZE>;
    using T = ELEMENT;
    const Sizes n = *sizes;
    const View Q = checked(*q, n), K = checked(*k, n), V = checked(*v, n), dO = checked(*d_o, n);
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n.head_size)));
    const int64_t heads = n.batch * n.heads;
    const int tiles_bytes = Tile<T, HEAD_SIZE>::bytes(2 * TILE + 4 * Shape::STEP);
    const int statistics_bytes = 2 * Shape::STEP * static_cast<int>(sizeof(Statistics));

    const char* error =
        launch(row_statistics<T, HEAD_SIZE>, tiles_of(n.n_q) * heads, STATISTICS_THREADS,
               Tile<T, HEAD_SIZE>::bytes(2 * TILE), stream, n, checked(*o, n), dO, logsumexp, statistics);
    if (!error && dk)
        error = launch(key_gradients<T, HEAD_SIZE>, tiles_of(n.n_k) * heads, Shape::THREADS,
                       tiles_bytes + statistics_bytes, stream, n, Q, K, V, dO, checked(*dk, n), checked(*dv, n),
                       statistics, scale);
    if (!error && dq)
        error = launch(query_gradients<T, HEAD_SIZE>, tiles_of(n.n_q) * heads, Shape::THREADS, tiles_bytes, stream, n,
                       Q, K, V, dO, checked(*dq, n), statistics, scale);
    return error;
}
