// FlashAttention for Hopper, backward pass: one walk over the queries gives dQ, dK and dV.
//
// With P = exp(scale S - logsumexp), D = rowsum(dO O) and dS = P (dP - D), there are five products:
//
//     S = Q K^T      dP = dO V^T      dV += P^T dO      dK += dS^T Q      dQ += dS K
//
// dK and dQ are multiplied by scale = 1 / sqrt(head size) at the end.
//
// A tile has TILE keys, and each of two warpgroups has ROWS of them. A warpgroup computes S and dP transposed, a row
// for each of its keys. So P and dS are in registers where products need them, as left operands of dV and dK, which
// stay in registers too. Tiles of QUERIES queries come by. dQ needs the dS of all keys. The warpgroups exchange dS in
// shared memory, and each computes half of the tile's dQ, 64 x 64 numbers. TMA adds it to sums in global memory, in
// float32. Blocks add in any order, so the last bits of dQ differ from run to run.
//
// dQ is one tile of queries late, as in our Gluon kernel: when its product starts, the other warpgroup has long written
// its dS. S and dP begin with -logsumexp / scale and -D instead of zero, so nothing has to be subtracted afterwards. An
// iteration of `walk`, where dQ' is that of the tile before:
//
//     products    S, dP ............ | dV ...... | dQ', dK .......................
//     threads     (wait for S)  P    | dS = P dP | (wait for dQ')  store and add it
//
// That is for HEAD = 128. For HEAD = 64 the same instructions do half of the work, and waits weigh more. But registers
// and shared memory have room for tiles of twice as many queries, in halves a and b: `walk_in_halves` computes P of one
// half beside products of the other. They also have room for K in registers, so that S reads less of shared memory. An
// iteration of `walk_in_halves`:
//
//     products    S a, dP a ................. | dV a, dK a, S b, dP b, dQ' | dV b, dK b .............
//     threads     (wait for S a)  P a    dS a | (wait for S b)  P b   dS b | (wait for dQ')  store it
//
// TMA adds dQ' while S a of the next tile is computed.
//
// Three kernels: `prepare` computes -logsumexp / scale and -D and clears the sums, `gradients` is the walk, `finish`
// scales and rounds dQ. The first and the last are in sums.cuh.
#include "sums.cuh"

// The lanes of a warp that arrive when it gives a buffer back. One is enough, after __syncwarp. compute-sanitizer's
// racecheck wants all 32, which take up to 3 % longer.
#ifndef LANES_THAT_ARRIVE
#define LANES_THAT_ARRIVE 1
#endif

namespace {

// A tile of keys, and the tiles of queries that see it, from `begin` to before `end`.
template <int HEAD>
struct Place {
    int batch, key_head, key0, begin, end;

    __device__ Place(const Parameters& x, int tile) {
        constexpr int TILE = Backward<HEAD>::TILE, QUERIES = Backward<HEAD>::QUERIES;
        const HeadAndIndex at(x, tile, ceil_div(x.n_k, TILE));
        batch = at.head / x.key_heads, key_head = at.head % x.key_heads;
        key0 = at.index * TILE;  // causal: the longest first
        end = ceil_div(min(x.n_q, x.after_query(batch, key0 + TILE - 1)), QUERIES);
        begin = x.is_causal ? min(key0 / QUERIES, end) : 0;
    }
};

// The loading thread. It brings tiles in the order in which they are read.
template <int HEAD>
__device__ inline void load(const Parameters& x) {
    using B = Backward<HEAD>;
    const int group_size = x.heads / x.key_heads;  // heads of q for each head of k and v
    const int64_t to_dp = x.padded_row<HEAD>(x.tiles / ceil_div(x.n_k, B::TILE) * group_size, 0);
    int step = 0;
    for (int tile = blockIdx.x, i = 0; tile < x.tiles; i++) {
        const Place<HEAD> place(x, tile);
        B::kv_empty().wait(i & 1 ^ 1);
        B::kv_full().expect(2 * B::Keys::BYTES);
        for (int c = 0; c < HEAD / 64; c++) {
            load_tile(B::k().block(c), x.k, B::kv_full(), place.batch, place.key_head, place.key0, c * 64);
            load_tile(B::v().block(c), x.v, B::kv_full(), place.batch, place.key_head, place.key0, c * 64);
        }
        for (int head = place.key_head * group_size; head < (place.key_head + 1) * group_size; head++)
            for (int t = place.begin; t < place.end; t++, step++) {
                const Barrier full = B::full(step);
                B::empty(step).wait(B::parity(step) ^ 1);
                full.expect(2 * (B::Queries::BYTES + B::INITIAL_BYTES));
                for (int c = 0; c < HEAD / 64; c++) {
                    load_tile(B::q(step).block(c), x.q, full, place.batch, head, t * B::QUERIES, c * 64);
                    load_tile(B::d_o(step).block(c), x.d_o, full, place.batch, head, t * B::QUERIES, c * 64);
                }
                const float* initial = x.initial + x.padded_row<HEAD>(place.batch * x.heads + head, t);
                load_bytes(B::s_initial(step), initial, B::INITIAL_BYTES, full);
                load_bytes(B::dp_initial(step), initial + to_dp, B::INITIAL_BYTES, full);
            }
        // The place for the number is free: the warpgroups read the one it held before they computed tile i - 1, and
        // have given back that tile's k and v.
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
    const int row = group * B::ROWS + 16 * warp + lane / 4;  // in the tile: this thread's keys are row and row + 8
    const auto release = [&](Barrier empty) {
        __syncwarp();  // all lanes have read what the first one gives back for them
        if (lane < LANES_THAT_ARRIVE) empty.arrive();
    };
    // Each step reads the dS that the step before has written; step 0 reads zeros. The first dQ' of a walk is not used.
    const auto store_ds = [&](int reader, int half, const uint32_t (&ds)[B::HALF / 16][4]) {
#pragma unroll
        for (int n = 0; n < B::HALF / 16; n++)
            B::ds(reader).write_operand(ds[n], half * (B::HALF / 16) + n, group * B::ROWS);
    };
    const auto publish_ds = [&](int reader) {
        fence_async();
        release(B::ds_full(reader));
    };
    uint32_t zeros[B::HALF / 16][4] = {};
    for (int half = 0; half < B::HALVES; half++) store_ds(0, half, zeros);
    publish_ds(0);

    int step = 0;
    for (int tile = blockIdx.x, i = 0; tile < x.tiles; i++) {
        const Place<HEAD> place(x, tile);
        // This thread's keys h = 0, 1 are seen by the queries from[h] to before until[h]. All keys of the warpgroup are
        // seen by the queries from_all to before until_all.
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
        float s[B::HALF / 2], dp[B::HALF / 2], dq[B::SUMS / 128];
        uint32_t k_rows[HEAD / 16][4];  // K of the warpgroup as operands, for HEAD = 64
        uint32_t p[B::HALF / 16][4], ds[B::HALF / 16][4];

        // Accumulators for 64 keys and 64 queries begin with a number for each query.
        const auto begin_with = [&](float(&c)[B::HALF / 2], uint32_t initial) {
#pragma unroll
            for (int n = 0; n < B::HALF / 8; n++) {
                const float2 pair = *shared_pointer<float2>(initial + (8 * n + lane % 4 * 2) * 4);
                c[4 * n] = c[4 * n + 2] = pair.x;
                c[4 * n + 1] = c[4 * n + 3] = pair.y;
            }
        };
        // S and dP of a half, a group of products each.
        const auto start_scores = [&](int half) {
            const typename B::Keys k{forget(B::k().address)}, v{forget(B::v().address)};
            const int query = half * B::HALF;
            begin_with(s, B::s_initial(step) + query * 4);
            begin_with(dp, B::dp_initial(step) + query * 4);
            claim(s), claim(dp);  // the numbers are there before the fence
            fence_registers();
#pragma unroll
            for (int d = 0; d < HEAD / 16; d++) {
                const uint64_t q = B::q(step).over_columns(d, query);
                if constexpr (HEAD == 64)
                    multiply_registers<T, false>(s, k_rows[d], q, true);
                else
                    multiply_tiles<T, false, false>(s, k.over_columns(d, group * B::ROWS), q, true);
            }
            commit_products();
            fence_registers();
#pragma unroll
            for (int d = 0; d < HEAD / 16; d++)
                multiply_tiles<T, false, false>(dp, v.over_columns(d, group * B::ROWS),
                                                B::d_o(step).over_columns(d, query), true);
            commit_products();
        };
        const auto make_p = [&](int query0) {
            claim(s);
#pragma unroll
            for (int e = 0; e < B::HALF / 2; e++) s[e] = exp2_fast(s[e] * scale_log2);
            // The mask comes after: where a hidden score is above the logsumexp, 2^x may be infinite.
            if (query0 < from_all || query0 + B::HALF > until_all) {
#pragma unroll
                for (int e = 0; e < B::HALF / 2; e++) {
                    const int h = e / 2 % 2, query = query0 + e / 4 * 8 + lane % 4 * 2 + e % 2;
                    if (query < from[h] || query >= until[h]) s[e] = 0.0f;
                }
            }
#pragma unroll
            for (int n = 0; n < B::HALF / 16; n++) operand<T>(p[n], s, n);
        };
        const auto make_ds = [&] {
            claim(dp);
#pragma unroll
            for (int e = 0; e < B::HALF / 2; e++) dp[e] *= s[e];
#pragma unroll
            for (int n = 0; n < B::HALF / 16; n++) operand<T>(ds[n], dp, n);
        };
        // dV += P^T dO or dK += dS^T Q, for a half.
        const auto add_product = [&](float(&c)[HEAD / 2], const uint32_t (&a)[B::HALF / 16][4], typename B::Queries b,
                                     int half) {
#pragma unroll
            for (int n = 0; n < B::HALF / 16; n++)
                multiply_registers<T, true>(c, a[n], b.over_rows(half * (B::HALF / 16) + n), true);
        };
        // The warpgroup's square of dQ: 64 of 128 queries, or 64 of 128 columns.
        const auto start_dq = [&] {
            const typename B::Keys k{forget(B::k().address)};
            B::ds_full(step).wait(B::parity(step));
            fence_registers();
#pragma unroll
            for (int n = 0; n < B::TILE / 16; n++)
                multiply_tiles<T, true, true>(dq, B::ds(step).over_rows(n, HEAD == 64 ? group * 64 : 0),
                                              k.over_rows(n, HEAD == 64 ? 0 : group * 64), n > 0);
            commit_products();
        };
        const auto store_dq = [&] {
            claim(dq);
            if (is_first) wait_until_stores_have_read();
            meet(B::own(group), 128);
#pragma unroll
            for (int n = 0; n < 8; n++)
                *shared_pointer<float4>(B::sums(group) + (n * 128 + thread) * 16) =
                    float4{dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
        };
        const auto add_dq = [&](int batch_head, int t) {
            fence_async();
            meet(B::own(group), 128);
            if (is_first) {
                const int64_t first = x.padded_row<HEAD>(batch_head, t) * HEAD;
                add_to_global(x.sums + first + group * B::SUMS, B::sums(group), B::SUMS_BYTES);
                commit_stores();
            }
        };

        // A head's tiles of queries.
        const auto walk = [&](int batch_head) {
            for (int t = place.begin; t < place.end; t++, step++) {
                B::full(step).wait(B::parity(step));
                start_scores(0);
                wait_for_products<1>();
                make_p(t * B::QUERIES);
                fence_registers();
                add_product(dv, p, B::d_o(step), 0);
                commit_products();

                wait_for_products<1>();
                make_ds();
                B::ds_empty(step + 1).wait(B::parity(step + 1) ^ 1);
                store_ds(step + 1, 0, ds);
                publish_ds(step + 1);
                start_dq();
                fence_registers();
                add_product(dk, ds, B::q(step), 0);
                commit_products();

                wait_for_products<1>();
                claim(dv);
                claim(dq);
                release(B::ds_empty(step));
                if (t > place.begin) store_dq(), add_dq(batch_head, t - 1);
                wait_for_products<0>();
                claim(dk);
                release(B::empty(step));
            }
        };
        const auto walk_in_halves = [&](int batch_head) {
            for (int t = place.begin; t < place.end; t++, step++) {
                B::full(step).wait(B::parity(step));
                start_scores(0);
                if (t > place.begin + 1) add_dq(batch_head, t - 2);
                wait_for_products<1>();
                make_p(t * B::QUERIES);
                wait_for_products<0>();
                make_ds();
                B::ds_empty(step + 1).wait(B::parity(step + 1) ^ 1);
                store_ds(step + 1, 0, ds);
                fence_registers();
                add_product(dv, p, B::d_o(step), 0);
                add_product(dk, ds, B::q(step), 0);
                commit_products();
                start_scores(1);
                start_dq();

                wait_for_products<2>();
                claim(dv), claim(dk);
                make_p(t * B::QUERIES + B::HALF);
                wait_for_products<1>();
                make_ds();
                store_ds(step + 1, 1, ds);
                fence_registers();
                add_product(dv, p, B::d_o(step), 1);
                add_product(dk, ds, B::q(step), 1);
                commit_products();
                publish_ds(step + 1);  // its fence waits for the stores, so products run meanwhile
                wait_for_products<1>();
                release(B::ds_empty(step));
                store_dq();
                wait_for_products<0>();
                claim(dv), claim(dk);
                release(B::empty(step));
            }
        };

        B::kv_full().wait(i & 1);
        if constexpr (HEAD == 64) {
            const typename B::Keys k{forget(B::k().address)};
#pragma unroll
            for (int d = 0; d < HEAD / 16; d++) k.read_operand(k_rows[d], d, group * B::ROWS);
        }
        const int group_size = x.heads / x.key_heads;  // heads of q for each head of k and v
        for (int head = place.key_head * group_size; head < (place.key_head + 1) * group_size; head++) {
            const int batch_head = place.batch * x.heads + head;
            if constexpr (B::HALVES == 1)
                walk(batch_head);
            else
                walk_in_halves(batch_head);
            if (place.end == place.begin) continue;
            if (B::HALVES == 2 && place.end > place.begin + 1) add_dq(batch_head, place.end - 2);
            start_dq();
            wait_for_products<0>();
            store_dq();
            add_dq(batch_head, place.end - 1);
        }
        release(B::kv_empty());

        const auto store = [&](const TensorMap& map, const float(&c)[HEAD / 2], float factor) {
            const typename B::Gradients to{B::sums(group)};
            if (is_first) wait_until_stores_have_read();
            meet(B::own(group), 128);
#pragma unroll
            for (int n = 0; n < HEAD / 16; n++) {
                uint32_t rounded[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    rounded[i] = pack<T>(c[8 * n + 2 * i] * factor, c[8 * n + 2 * i + 1] * factor);
                to.write_operand(rounded, n, 0);
            }
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
        constexpr int arrivals = B::WARPS * LANES_THAT_ARRIVE;
        B::kv_full().initialise(1), B::kv_empty().initialise(arrivals);
        for (int i = 0; i < B::STAGES; i++) {
            B::full(i).initialise(1), B::empty(i).initialise(arrivals);
            B::ds_full(i).initialise(arrivals), B::ds_empty(i).initialise(arrivals);
        }
        for (int i = 0; i < 2; i++) B::next_ready(i).initialise(1);
        fence_async();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // so the compiler knows: the same in a whole warp
    if (group == B::GROUPS) {
        give_registers<B::LOADING_REGISTERS>();
        if (threadIdx.x % 128 == 0) load<HEAD>(parameters);
    } else {
        take_registers<B::REGISTERS>();
        compute<T, HEAD>(parameters, group);
    }
}

}  // namespace

// o, d_o and dq have q's sizes, dk and dv those of k; rows of all begin at multiples of 16 bytes. logsumexp is (B, H,
// n_q), ends is (B, n_k) or null, initial and sums are as in Parameters. Returns null or an error message.
extern "C" const char* hopper_backward(const Problem* problem, const View* q, const View* k, const View* v,
                                       const View* o, const View* d_o, const View* dq, const View* dk, const View* dv,
                                       const float* logsumexp, const int* ends, float* initial, float* sums,
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
    x.ends = ends, x.initial = initial, x.sums = sums, x.counter = counter;
    error = launch(hopper_prepare_kernel<ELEMENT, HEAD_SIZE>, rows, 128, 0, stream, x, *o, *d_o, logsumexp);
    if (error == nullptr)
        error = launch(hopper_gradients_kernel<ELEMENT, HEAD_SIZE>, tiles < p.blocks ? tiles : p.blocks, B::THREADS,
                       B::SHARED_BYTES, stream, x);
    if (error == nullptr) error = launch(hopper_finish_kernel<ELEMENT, HEAD_SIZE>, rows, 128, 0, stream, x, *dq);
    return error;
}
