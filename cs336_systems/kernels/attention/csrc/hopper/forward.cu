// FlashAttention for Hopper, forward pass: O and the logsumexp, as in FlashAttention-3 (Shah et al. 2024).
//
// A block has a thread that loads and two or three warpgroups (four warps each) that compute. There are as many blocks
// as multiprocessors. Each takes tile after tile of queries, from a counter in memory. Tiles with most keys come first.
// A warpgroup has ROWS queries of the tile and walks over KEYS keys at a time, the last ones first:
//
//     S = q k^T                          q and k from shared memory, S in registers
//     P = exp2(c S - m)                  m: the largest c S of the row so far, or up to SLACK less;
//                                        c = log2(e) / sqrt(D), `scale_log2`
//     O = O exp2(old m - m) + P v        P and O in registers, v from shared memory
//
// Products run in the background (wgmma.cuh). A warpgroup starts S for the next keys and O += P v for the present ones,
// and computes the next P when both are done. The warpgroups take turns to start: while the products of one run, the
// others compute exponentials. Here are two warpgroups, with tiles of keys j = 3, 2, 1, ...:
//
//     first      start S(2), O += P(3) v    P(2) .................    start S(1), O += P(2) v    P(1) ........
//     second     P(3) ..................    start S(2), O += P(3) v   P(2) ..................    start S(1), ...
//
// The loading thread (TMA, tma.cuh) is ahead by up to STAGES tiles of keys and of values. It brings the next tile's
// queries while a warpgroup finishes and stores its O.
//
// Masks: a warpgroup's queries begin at a multiple of ROWS, which divides KEYS. So the causal mask and the end of the
// keys cut only its last tile of keys. A band (window and documents: contract.py) can cut any. A row sees the keys from
// `first` to `last`.
#include "registers.cuh"
#include "swizzle.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
#include "work.cuh"

#include "../launch.cuh"
#include "../rows.cuh"

namespace {

template <int HEAD>
struct Forward {
    static constexpr int ROWS = 64, KEYS = 128, STAGES = 2;
    static constexpr int GROUPS = HEAD == 64 ? 3 : 2;  // warpgroups that compute
    static constexpr int TILE = GROUPS * ROWS;
    static constexpr float SLACK = 8;
    static constexpr int THREADS = 128 * (GROUPS + 1);
    static constexpr int REGISTERS = GROUPS == 3 ? 160 : 240, LOADING_REGISTERS = GROUPS == 3 ? 32 : 24;

    using Queries = SwizzledTile<ROWS, HEAD>;  // of one warpgroup; O has the same shape
    using Keys = SwizzledTile<KEYS, HEAD>;     // and values

    // The barriers: a pair for each warpgroup's queries, a pair for each stage of keys and of values, two for the next
    // tile.
    static constexpr int Q = 0, K = 2 * GROUPS, V = K + 2 * STAGES, NEXT = V + 2 * STAGES, BARRIERS = NEXT + 2;
    static constexpr int SHARED_BYTES =
        2 * GROUPS * Queries::BYTES + 2 * STAGES * Keys::BYTES + BARRIERS * Barrier::BYTES + 2 * sizeof(int);
    static_assert(THREADS * (65536 / THREADS / 8 * 8) >= 128 * (GROUPS * REGISTERS + LOADING_REGISTERS));

    // Shared memory, in this order.
    __device__ static Queries q(int group) { return {shared_memory() + group * Queries::BYTES}; }
    __device__ static Queries o(int group) { return q(GROUPS + group); }
    __device__ static Keys k(int step) { return {q(2 * GROUPS).address + step % STAGES * Keys::BYTES}; }
    __device__ static Keys v(int step) { return {k(0).address + (STAGES + step % STAGES) * Keys::BYTES}; }
    __device__ static Barrier barrier(int i) {
        return {k(0).address + 2 * STAGES * Keys::BYTES + i * Barrier::BYTES};
    }
    __device__ static uint32_t next_tile(int i) { return barrier(BARRIERS).address + i % 2 * 4; }

    __device__ static Barrier q_full(int group) { return barrier(Q + group); }
    __device__ static Barrier q_empty(int group) { return barrier(Q + GROUPS + group); }
    __device__ static Barrier k_full(int step) { return barrier(K + step % STAGES); }
    __device__ static Barrier k_empty(int step) { return barrier(K + STAGES + step % STAGES); }
    __device__ static Barrier v_full(int step) { return barrier(V + step % STAGES); }
    __device__ static Barrier v_empty(int step) { return barrier(V + STAGES + step % STAGES); }
    __device__ static Barrier next_ready(int i) { return barrier(NEXT + i % 2); }
    __device__ static int parity(int step) { return step / STAGES & 1; }

    // The named barriers: a warpgroup's turn, and a meeting of its own four warps.
    __device__ static int turn_of(int group) { return 1 + group % GROUPS; }
    __device__ static int own(int group) { return 1 + GROUPS + group; }
};

struct Parameters : Sizes32 {
    TensorMap q, k, v, o;
    float* logsumexp;   // (B, H, n_q)
    const int* starts;  // (B, n_q): the first key of each query's document; or null
    int* counter;       // tiles that blocks have taken, not counting each block's first

    // The first key that a query sees, by the band alone.
    __device__ int first_key(int batch, int query) const {
        query = min(query, n_q - 1);
        const int in_window = max(query - window + 1, 0);
        return starts == nullptr ? in_window : max(in_window, starts[static_cast<int64_t>(batch) * n_q + query]);
    }

    // One more than the last key that the queries before `end` see.
    __device__ int end_of_keys(int end) const { return is_causal ? min(end, n_k) : n_k; }
};

// A tile of queries, and the tiles of keys that it sees, from `begin` to before `end`.
template <int HEAD>
struct Place {
    int batch, head, key_head, query0, begin, end;

    __device__ Place(const Parameters& x, int tile) {
        constexpr int TILE = Forward<HEAD>::TILE, KEYS = Forward<HEAD>::KEYS;
        const int tiles_per_head = ceil_div(x.n_q, TILE);
        const HeadAndIndex at(x, tile, tiles_per_head);
        batch = at.head / x.heads, head = at.head % x.heads;
        key_head = head / (x.heads / x.key_heads);
        query0 = (tiles_per_head - 1 - at.index) * TILE;  // causal: the longest first
        begin = x.first_key(batch, query0) / KEYS;
        end = ceil_div(x.end_of_keys(query0 + TILE), KEYS);
    }
};

// The loading thread. It brings tiles in the order in which they are read.
template <int HEAD>
__device__ inline void load(const Parameters& x) {
    using F = Forward<HEAD>;
    const auto load_keys = [&](const TensorMap& map, typename F::Keys to, Barrier full, Barrier empty, int step,
                               const Place<HEAD>& place, int tile_of_keys) {
        empty.wait(F::parity(step) ^ 1);
        full.expect(F::Keys::BYTES);
        for (int i = 0; i < HEAD / 64; i++)
            load_tile(to.block(i), map, full, place.batch, place.key_head, tile_of_keys * F::KEYS, i * 64);
    };
    int step = 0;  // tiles of keys before this tile of queries
    for (int tile = blockIdx.x, i = 0; tile < x.tiles; i++) {
        const Place<HEAD> place(x, tile);
        for (int group = 0; group < F::GROUPS; group++) {
            F::q_empty(group).wait(i & 1 ^ 1);
            F::q_full(group).expect(F::Queries::BYTES);
            for (int j = 0; j < HEAD / 64; j++)
                load_tile(F::q(group).block(j), x.q, F::q_full(group), place.batch, place.head,
                          place.query0 + group * F::ROWS, j * 64);
        }
        // The scores of the next keys are computed before the output of the present ones: so k is one step ahead.
        const int steps = place.end - place.begin;
        for (int s = 0; s <= steps; s++) {
            const int now = step + s, before = now - 1;
            if (s < steps)
                load_keys(x.k, F::k(now), F::k_full(now), F::k_empty(now), now, place, place.end - 1 - s);
            if (s > 0)
                load_keys(x.v, F::v(before), F::v_full(before), F::v_empty(before), before, place, place.end - s);
        }
        step += steps;
        // The place for the number is free: the warpgroups read the one it held before they computed tile i - 1, and
        // have given back that tile's q.
        tile = gridDim.x + atomicAdd(x.counter, 1);
        *shared_pointer<int>(F::next_tile(i)) = tile;
        F::next_ready(i).arrive();
    }
}

// A warpgroup that computes: O and the logsumexp of its queries in each tile.
template <typename T, int HEAD>
__device__ inline void compute(const Parameters& x, int group) {
    using F = Forward<HEAD>;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const bool is_first = threadIdx.x % 128 == 0;
    const float scale_log2 = x.scale * LOG2_E;  // exp(scale s) = 2^(scale_log2 s), and 2^x is one instruction
    const auto release = [&](Barrier empty) {
        if (lane == 0) empty.arrive();  // for the whole warp
    };
    const auto wait_for_turn = [&] { meet(F::turn_of(group), 256); };
    const auto pass_turn = [&] { arrive(F::turn_of(group + 1), 256); };
    if (group == F::GROUPS - 1) pass_turn();  // the first turn is the first warpgroup's

    int step = 0;
    for (int tile = blockIdx.x, i = 0; tile < x.tiles; i++) {
        const Place<HEAD> place(x, tile);
        const int query0 = place.query0 + group * F::ROWS, row = query0 + 16 * warp + lane / 4;

        // The warpgroup's tiles of keys are from begin to before end; one tile if its rows are beyond the last query. All
        // its rows see all keys of the tiles from `whole` on, except for the last tile. This thread's rows h = 0, 1 see
        // the keys first[h] to last[h].
        const int begin = x.first_key(place.batch, query0) / F::KEYS;
        const int end = query0 < x.n_q ? ceil_div(x.end_of_keys(query0 + F::ROWS), F::KEYS) : begin + 1;
        const int whole = min(ceil_div(x.first_key(place.batch, query0 + F::ROWS - 1), F::KEYS), end - 1);
        int first[2], last[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            first[h] = x.first_key(place.batch, row + 8 * h);
            last[h] = x.end_of_keys(row + 8 * h + 1) - 1;
        }

        float o[HEAD / 2], s[F::KEYS / 2];  // in the places of wgmma.cuh
        uint32_t p[F::KEYS / 16][4];        // the probabilities, as operands
        float largest[2], sum[2], shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) largest[h] = -INFINITY, sum[h] = 0.0f;

        const auto start_scores = [&](int step) {
            F::k_full(step).wait(F::parity(step));
            fence_registers();
#pragma unroll
            for (int d = 0; d < HEAD / 16; d++)
                multiply_tiles<T, false, false>(s, F::q(group).over_columns(d), F::k(step).over_columns(d), d > 0);
            commit_products();
        };
        const auto start_output = [&](int step) {
            F::v_full(step).wait(F::parity(step));
            fence_registers();
#pragma unroll
            for (int n = 0; n < F::KEYS / 16; n++)
                multiply_registers<T, true>(o, p[n], F::v(step).over_rows(n), true);
            commit_products();
        };
        // The online softmax: s becomes probabilities. With a new maximum, the sums so far shrink by 2^(old - new). A score
        // may be above the maximum by up to SLACK, so that the sums seldom have to: its probability is at most 2^SLACK.
        const auto softmax = [&](int key0, bool is_masked) {
            if (is_masked) {
#pragma unroll
                for (int e = 0; e < F::KEYS / 2; e++) {
                    const int h = e / 2 % 2, key = key0 + e / 4 * 8 + lane % 4 * 2 + e % 2;
                    if (key < first[h] || key > last[h]) s[e] = -INFINITY;
                }
            }
            float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int e = 0; e < F::KEYS / 2; e++) top[e / 2 % 2] = fmaxf(top[e / 2 % 2], s[e]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float before = largest[h];
                const float found = max_of_row(top[h]) * scale_log2;
                if (found > before + F::SLACK) largest[h] = found;
                // While no score is finite: -inf - -inf is no number, but -inf - 0 gives 2^-inf = 0.
                top[h] = largest[h] == -INFINITY ? 0.0f : largest[h];
                shrink[h] = exp2_fast(before - top[h]);
                sum[h] *= shrink[h];
            }
#pragma unroll
            for (int e = 0; e < F::KEYS / 2; e++) {
                s[e] = exp2_fast(s[e] * scale_log2 - top[e / 2 % 2]);
                sum[e / 2 % 2] += s[e];
            }
        };
        const auto pack_probabilities = [&] {
#pragma unroll
            for (int n = 0; n < F::KEYS / 16; n++) operand<T>(p[n], s, n);
        };
        // Tiles of keys that only other warpgroups see. For each, this one takes its turn and passes it on.
        const auto pass_over = [&](int tiles) {
            for (; tiles > 0; tiles--, step++) {
                F::k_full(step).wait(F::parity(step));
                release(F::k_empty(step));
                F::v_full(step).wait(F::parity(step));
                release(F::v_empty(step));
                wait_for_turn();
                pass_turn();
            }
        };
        // From tile of keys j + 1, whose probabilities are in p, to tile j.
        const auto next_keys = [&](int j, bool is_masked) {
            wait_for_turn();
            start_scores(step + 1);
            start_output(step);
            pass_turn();
            wait_for_products<1>();
            claim(s);
            release(F::k_empty(step + 1));
            wait_for_products<0>();
            claim(o);
            release(F::v_empty(step));
            softmax(j * F::KEYS, is_masked);
            pack_probabilities();
            if (__any_sync(0xffffffff, shrink[0] < 1.0f || shrink[1] < 1.0f))
#pragma unroll
                for (int e = 0; e < HEAD / 2; e++) o[e] *= shrink[e / 2 % 2];
            step++;
        };

        pass_over(place.end - end);
        F::q_full(group).wait(i & 1);
        start_scores(step);
        wait_for_products<0>();
        claim(s);
        release(F::k_empty(step));
        softmax((end - 1) * F::KEYS, true);
        pack_probabilities();
#pragma unroll
        for (int e = 0; e < HEAD / 2; e++) o[e] = 0.0f;
        int j = end - 2;
        for (; j >= whole; j--) next_keys(j, false);
        for (; j >= begin; j--) next_keys(j, true);
        release(F::q_empty(group));
        start_output(step);
        wait_for_products<0>();
        claim(o);
        release(F::v_empty(step));
        step++;
        pass_over(begin - place.begin);

        // O goes by way of shared memory, which the store of the tile before must have read.
        if (is_first) wait_until_stores_have_read();
        meet(F::own(group), 128);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float total = sum_of_row(sum[h]), inverse = 1.0f / total;
#pragma unroll
            for (int n = 0; n < HEAD / 8; n++)
                *shared_pointer<uint32_t>(F::o(group).at(16 * warp + 8 * h + lane / 4, 8 * n + lane % 4 * 2)) =
                    pack<T>(o[4 * n + 2 * h] * inverse, o[4 * n + 2 * h + 1] * inverse);
            const int query = row + 8 * h;
            if (lane % 4 == 0 && query < x.n_q)
                x.logsumexp[(static_cast<int64_t>(place.batch) * x.heads + place.head) * x.n_q + query] =
                    (largest[h] + log2f(total)) * LN_2;
        }
        fence_async();
        F::next_ready(i).wait(i / 2 & 1);
        tile = *shared_pointer<int>(F::next_tile(i));
        meet(F::own(group), 128);
        if (is_first) {
            for (int c = 0; c < HEAD / 64; c++)
                store_tile(x.o, F::o(group).block(c), place.batch, place.head, query0, c * 64);
            commit_stores();
        }
    }
    if (is_first) wait_until_stores_have_read();
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(Forward<HEAD>::THREADS, 1)
    hopper_forward_kernel(const __grid_constant__ Parameters parameters) {
    using F = Forward<HEAD>;
    if (threadIdx.x == 0) {
        for (int i = 0; i < F::GROUPS; i++) F::q_full(i).initialise(1), F::q_empty(i).initialise(4);
        for (int i = 0; i < F::STAGES; i++) {
            F::k_full(i).initialise(1), F::k_empty(i).initialise(4 * F::GROUPS);
            F::v_full(i).initialise(1), F::v_empty(i).initialise(4 * F::GROUPS);
        }
        for (int i = 0; i < 2; i++) F::next_ready(i).initialise(1);
        fence_async();
    }
    __syncthreads();
    const int group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // so the compiler knows: the same in a whole warp
    if (group == F::GROUPS) {
        give_registers<F::LOADING_REGISTERS>();
        if (threadIdx.x % 128 == 0) load<HEAD>(parameters);
    } else {
        take_registers<F::REGISTERS>();
        compute<T, HEAD>(parameters, group);
    }
}

}  // namespace

// o has q's sizes, logsumexp is (B, H, n_q), starts is (B, n_q) or null, counter is one number. Returns null or an
// error message.
extern "C" const char* hopper_forward(const Problem* problem, const View* q, const View* k, const View* v,
                                      const View* o, float* logsumexp, const int* starts, int* counter, void* stream) {
    using F = Forward<HEAD_SIZE>;
    const Problem& p = *problem;
    const int64_t tiles = (p.n_q + F::TILE - 1) / F::TILE * p.batch * p.heads;
    if (tiles > INT_MAX - p.blocks) return "the problem has more tiles than a 32-bit number counts";
    Parameters x{Sizes32(p, tiles)};
    const auto map = [&](TensorMap& map, const View* view, int64_t heads, int64_t n, int rows) {
        return make_tensor_map<ELEMENT>(map, *view, p.batch, heads, n, p.head_size, rows);
    };
    const char* error = map(x.q, q, p.heads, p.n_q, F::ROWS);
    if (error == nullptr) error = map(x.k, k, p.key_heads, p.n_k, F::KEYS);
    if (error == nullptr) error = map(x.v, v, p.key_heads, p.n_k, F::KEYS);
    if (error == nullptr) error = map(x.o, o, p.heads, p.n_q, F::ROWS);
    if (error == nullptr) error = clear(counter, sizeof(int), stream);
    if (error != nullptr) return error;
    x.logsumexp = logsumexp, x.starts = starts, x.counter = counter;
    return launch(hopper_forward_kernel<ELEMENT, HEAD_SIZE>, tiles < p.blocks ? tiles : p.blocks, F::THREADS,
                  F::SHARED_BYTES, stream, x);
}
