// A kernel for each building block of csrc/hopper, for test_hopper_blocks.py: on a GPU and in the emulator.
#include "hopper/registers.cuh"
#include "hopper/swizzle.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

#include "launch.cuh"

constexpr int ROWS = 64, KEYS = 128, HEAD = HEAD_SIZE;
using Rows = SwizzledTile<ROWS, HEAD>;
using Keys = SwizzledTile<KEYS, HEAD>;

struct Maps {
    TensorMap x, y, z;
};

__device__ inline void begin(Barrier barrier) {
    if (threadIdx.x == 0) barrier.initialise(1), fence_async();
    __syncthreads();
}

// y = 1 + x for the 64 rows from `row` on of one head: loaded and stored by TMA, changed by ordinary accesses.
__global__ void __launch_bounds__(128, 1) copy_kernel(const __grid_constant__ Maps maps, int batch, int head, int row) {
    const Rows tile{shared_memory()};
    const Barrier barrier{shared_memory() + Rows::BYTES};
    begin(barrier);
    if (threadIdx.x == 0) {
        barrier.expect(Rows::BYTES);
        for (int i = 0; i < HEAD / 64; i++) load_tile(tile.block(i), maps.x, barrier, batch, head, row, 64 * i);
    }
    barrier.wait(0);
    for (int column = 0; column < HEAD / 2; column++) {
        const int half = threadIdx.x / ROWS * (HEAD / 2);
        const auto element = shared_pointer<ELEMENT>(tile.at(threadIdx.x % ROWS, half + column));
        const ELEMENT x = *element;
        *element = from_float<ELEMENT>(1.0f + to_float(x));
    }
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < HEAD / 64; i++) store_tile(maps.y, tile.block(i), batch, head, row, 64 * i);
        commit_stores();
        wait_for_stores();
    }
}

// y = x for 64 rows, by way of the threads' operands.
__global__ void __launch_bounds__(128, 1) operands_kernel(const __grid_constant__ Maps maps) {
    const Rows from{shared_memory()}, to{shared_memory() + Rows::BYTES};
    const Barrier barrier{to.address + Rows::BYTES};
    begin(barrier);
    if (threadIdx.x == 0) {
        barrier.expect(Rows::BYTES);
        for (int i = 0; i < HEAD / 64; i++) load_tile(from.block(i), maps.x, barrier, 0, 0, 0, 64 * i);
    }
    barrier.wait(0);
#pragma unroll
    for (int d = 0; d < HEAD / 16; d++) {
        uint32_t a[4];
        from.read_operand(a, d, 0);
        to.write_operand(a, d, 0);
    }
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < HEAD / 64; i++) store_tile(maps.y, to.block(i), 0, 0, 0, 64 * i);
        commit_stores();
        wait_for_stores();
    }
}

// scores (64 x 128) = x y^T, and output (64 x HEAD) = scores z, the scores rounded: 64 rows of x, from shared
// memory or from registers, 128 of y and z.
template <bool FROM_REGISTERS>
__global__ void __launch_bounds__(128, 1)
    products_kernel(const __grid_constant__ Maps maps, float* scores, float* output) {
    const Rows x{shared_memory()};
    const Keys y{x.address + Rows::BYTES}, z{y.address + Keys::BYTES};
    const Barrier barrier{z.address + Keys::BYTES};
    begin(barrier);
    if (threadIdx.x == 0) {
        barrier.expect(Rows::BYTES + 2 * Keys::BYTES);
        for (int i = 0; i < HEAD / 64; i++) {
            load_tile(x.block(i), maps.x, barrier, 0, 0, 0, 64 * i);
            load_tile(y.block(i), maps.y, barrier, 0, 0, 0, 64 * i);
            load_tile(z.block(i), maps.z, barrier, 0, 0, 0, 64 * i);
        }
    }
    barrier.wait(0);

    float s[KEYS / 2], o[HEAD / 2];
    uint32_t p[KEYS / 16][4], rows[HEAD / 16][4];
#pragma unroll
    for (int d = 0; d < HEAD / 16; d++)
        if constexpr (FROM_REGISTERS) x.read_operand(rows[d], d, 0);
    fence_registers();
#pragma unroll
    for (int d = 0; d < HEAD / 16; d++)
        if constexpr (FROM_REGISTERS)
            multiply_registers<ELEMENT, false>(s, rows[d], y.over_columns(d), d > 0);
        else
            multiply_tiles<ELEMENT, false, false>(s, x.over_columns(d), y.over_columns(d), d > 0);
    commit_products();
    wait_for_products<0>();
    claim(s);
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) operand<ELEMENT>(p[n], s, n);
    fence_registers();
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) multiply_registers<ELEMENT, true>(o, p[n], z.over_rows(n), n > 0);
    commit_products();
    wait_for_products<0>();
    claim(o);

    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < KEYS / 2; e++)
        scores[(row + e / 2 % 2 * 8) * KEYS + e / 4 * 8 + column + e % 2] = s[e];
#pragma unroll
    for (int e = 0; e < HEAD / 2; e++)
        output[(row + e / 2 % 2 * 8) * HEAD + e / 4 * 8 + column + e % 2] = o[e];
}

// output (64 x 64) = x^T y for 64 columns of both, those of y from `column` on, and 128 rows.
__global__ void __launch_bounds__(128, 1)
    transposed_kernel(const __grid_constant__ Maps maps, int column, float* output) {
    const SwizzledTile<KEYS, 64> x{shared_memory()};
    const Keys y{x.address + x.BYTES};
    const Barrier barrier{y.address + Keys::BYTES};
    begin(barrier);
    if (threadIdx.x == 0) {
        barrier.expect(x.BYTES + Keys::BYTES);
        load_tile(x.address, maps.x, barrier, 0, 0, 0, 0);
        for (int i = 0; i < HEAD / 64; i++) load_tile(y.block(i), maps.y, barrier, 0, 0, 0, 64 * i);
    }
    barrier.wait(0);
    float o[32];
    fence_registers();
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++)
        multiply_tiles<ELEMENT, true, true>(o, x.over_rows(n), y.over_rows(n, column), n > 0);
    commit_products();
    wait_for_products<0>();
    claim(o);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int e = 0; e < 32; e++)
        output[(row + e / 2 % 2 * 8) * 64 + e / 4 * 8 + threadIdx.x % 4 * 2 + e % 2] = o[e];
}

// to (256) += 2 from[i] of each block i, and once more: from[i] (256) is loaded, doubled, and added by TMA.
__global__ void __launch_bounds__(128, 1) sums_kernel(float* to, const float* from) {
    constexpr int BYTES = 1024;
    const Barrier barrier{shared_memory() + BYTES};
    begin(barrier);
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x == 0) {
            barrier.expect(BYTES);
            load_bytes(shared_memory(), from + 256 * blockIdx.x, BYTES, barrier);
        }
        barrier.wait(round);
        for (int i = 0; i < 2; i++) {
            const auto element = shared_pointer<float>(shared_memory() + 4 * (threadIdx.x + 128 * i));
            const float x = *element;
            *element = 2.0f * x;
        }
        fence_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            add_to_global(to, shared_memory(), BYTES);
            commit_stores();
            wait_until_stores_have_read();
        }
    }
    if (threadIdx.x == 0) wait_for_stores();
}

// Three warpgroups take turns to append their number, and hold more registers each than at launch.
__global__ void __launch_bounds__(512, 1) turns_kernel(int* numbers) {
    const int group = threadIdx.x / 128;
    if (group == 3) {
        give_registers<32>();
    } else {
        take_registers<160>();
        if (group == 2) arrive(1, 256);
        for (int i = 0; i < 4; i++) {
            meet(1 + group, 256);
            if (threadIdx.x % 128 == 0) numbers[1 + atomicAdd(numbers, 1)] = group;
            arrive(1 + (group + 1) % 3, 256);
        }
    }
}

// x and y are (batch, heads, n, head_size).
extern "C" const char* copy(const View* x, const View* y, const int64_t* sizes, const int64_t* place, void* stream) {
    Maps maps;
    const char* error = make_tensor_map<ELEMENT>(maps.x, *x, sizes[0], sizes[1], sizes[2], sizes[3], ROWS);
    if (error == nullptr) error = make_tensor_map<ELEMENT>(maps.y, *y, sizes[0], sizes[1], sizes[2], sizes[3], ROWS);
    if (error != nullptr) return error;
    return launch(copy_kernel, 1, 128, Rows::BYTES + Barrier::BYTES, stream, maps, static_cast<int>(place[0]),
                  static_cast<int>(place[1]), static_cast<int>(place[2]));
}

extern "C" const char* operands(const View* x, const View* y, void* stream) {
    Maps maps;
    const char* error = make_tensor_map<ELEMENT>(maps.x, *x, 1, 1, ROWS, HEAD, ROWS);
    if (error == nullptr) error = make_tensor_map<ELEMENT>(maps.y, *y, 1, 1, ROWS, HEAD, ROWS);
    if (error != nullptr) return error;
    return launch(operands_kernel, 1, 128, 2 * Rows::BYTES + Barrier::BYTES, stream, maps);
}

extern "C" const char* products(const View* x, const View* y, const View* z, float* scores, float* output,
                                const int64_t* from_registers, void* stream) {
    Maps maps;
    const char* error = make_tensor_map<ELEMENT>(maps.x, *x, 1, 1, ROWS, HEAD, ROWS);
    if (error == nullptr) error = make_tensor_map<ELEMENT>(maps.y, *y, 1, 1, KEYS, HEAD, KEYS);
    if (error == nullptr) error = make_tensor_map<ELEMENT>(maps.z, *z, 1, 1, KEYS, HEAD, KEYS);
    if (error != nullptr) return error;
    return launch(*from_registers ? products_kernel<true> : products_kernel<false>, 1, 128,
                  Rows::BYTES + 2 * Keys::BYTES + Barrier::BYTES, stream, maps, scores, output);
}

extern "C" const char* transposed(const View* x, const View* y, const int64_t* column, float* output, void* stream) {
    Maps maps;
    const char* error = make_tensor_map<ELEMENT>(maps.x, *x, 1, 1, KEYS, 64, KEYS);
    if (error == nullptr) error = make_tensor_map<ELEMENT>(maps.y, *y, 1, 1, KEYS, HEAD, KEYS);
    if (error != nullptr) return error;
    return launch(transposed_kernel, 1, 128, SwizzledTile<KEYS, 64>::BYTES + Keys::BYTES + Barrier::BYTES, stream, maps,
                  static_cast<int>(*column), output);
}

extern "C" const char* sums(float* to, const float* from, const int64_t* blocks, void* stream) {
    return launch(sums_kernel, *blocks, 128, 1024 + Barrier::BYTES, stream, to, from);
}

extern "C" const char* turns(int* numbers, void* stream) {
    return launch(turns_kernel, 1, 512, 1024, stream, numbers);
}
