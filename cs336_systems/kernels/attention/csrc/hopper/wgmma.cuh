// Matrix products of a warpgroup (PTX: wgmma): C (64 x N, in registers) += A (64 x 16) B (16 x N), in the background.
//
// Four warps, 128 threads, execute it together. B is a tile in shared memory, described by a descriptor (swizzle.cuh);
// A is one too, or is in registers. C is float32, in registers: thread t of warp w has, with g = t % 32 / 4,
//
//     c[4 n + 2 h + e]    row 16 w + 8 h + g, column 8 n + 2 (t % 4) + e        h, e = 0, 1; n = 0 ... N / 8 - 1
//
// As an operand A, 16-bit numbers in registers have the same places: a[i] holds columns 2 (t % 4) and the next one of
// row 16 w + 8 (i % 2) + g, in the first 8 of the 16 columns for i < 2, in the second 8 for i >= 2. So the scores of
// one product, rounded and packed in pairs, are the operand of the next: `operand` does it, without moving a number
// between threads.
//
// The products run while the threads go on. The order in a thread:
//
//     fence_registers();           // writes to c and a so far are done before the products read them
//     multiply_...(c, a, b, ...);  // any number, on the same accumulators or on others
//     commit_products();           // these are one group
//     ... other work, which must not touch c and a ...
//     wait_for_products<P>();      // all groups but the latest P are finished
//     claim(c);                    // from here on c has the result
//
// The C++ compiler knows nothing of this: to it, a product has changed c when it returns. `claim` is an empty
// instruction that seems to change c. Nothing that uses c can be moved above it, and it cannot be moved above the wait.
// The assembler, ptxas, does know. If it finds that an accumulator is touched while a product may run, it waits after
// each product instead. This is right but slow. ptxas warns of it (C7512, C7514, C7515), and our build makes this an
// error.
//
// Other waits: before a product reads a tile that TMA loads, wait for the tile's barrier. Before anything writes to a
// tile, wait until the products that read it have finished. Before a product reads what threads wrote, these threads
// execute fence_async() (tma.cuh).
#pragma once

#include "../instructions.cuh"

__device__ inline void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ inline void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N>
__device__ inline void claim(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// Columns 16 step to 16 step + 15 of c as an operand, rounded to T.
template <typename T, int N>
__device__ inline void operand(uint32_t (&a)[4], const float (&c)[N], int step) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = pack<T>(c[8 * step + 2 * i], c[8 * step + 2 * i + 1]);
}

#define ACCUMULATORS_32 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ACCUMULATORS_64 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define EIGHT(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
        "+f"(c[i + 7])
#define OPERANDS_32(c) EIGHT(c, 0), EIGHT(c, 8), EIGHT(c, 16), EIGHT(c, 24)
#define OPERANDS_64(c) OPERANDS_32(c), EIGHT(c, 32), EIGHT(c, 40), EIGHT(c, 48), EIGHT(c, 56)

// A product with N columns has N / 2 accumulators a thread, from %0 on. The other operands have the numbers after them.
#define PRODUCT_OF_TILES(N, TYPE, ACCUMULATORS, OPERANDS, A, B, ADD, A_TRANSPOSED, B_TRANSPOSED)                      \
    asm volatile("{ .reg .pred add;\n"                                                                                \
                 "setp.ne.b32 add, " ADD ", 0;\n"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " " ACCUMULATORS ", " A                \
                 ", " B ", add, 1, 1, " A_TRANSPOSED ", " B_TRANSPOSED "; }"                                          \
                 : OPERANDS(c)                                                                                        \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(static_cast<int>(A_OVER_ROWS)),                    \
                   "n"(static_cast<int>(B_OVER_ROWS)))
#define PRODUCT_OF_REGISTERS(N, TYPE, ACCUMULATORS, OPERANDS, A, B, ADD, B_TRANSPOSED)                                \
    asm volatile("{ .reg .pred add;\n"                                                                                \
                 "setp.ne.b32 add, " ADD ", 0;\n"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " " ACCUMULATORS ", " A                \
                 ", " B ", add, 1, 1, " B_TRANSPOSED "; }"                                                            \
                 : OPERANDS(c)                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                    \
                   "n"(static_cast<int>(B_OVER_ROWS)))
#define OF_TILES(N, TYPE, COUNT, I, J, K, L, M) \
    PRODUCT_OF_TILES(N, TYPE, ACCUMULATORS_##COUNT, OPERANDS_##COUNT, "%" #I, "%" #J, "%" #K, "%" #L, "%" #M)

// C = A B, or C += A B if `add`. Both operands are tiles. A_OVER_ROWS and B_OVER_ROWS: the descriptor is one of
// `over_rows`, otherwise of `over_columns`.
template <typename T, bool A_OVER_ROWS, bool B_OVER_ROWS, int N>
__device__ inline void multiply_tiles(float (&c)[N], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 32 || N == 64);
    constexpr bool IS_HALF = std::is_same_v<T, __half>;
    if constexpr (N == 32 && IS_HALF)
        OF_TILES("64", "f16", 32, 32, 33, 34, 35, 36);
    else if constexpr (N == 32)
        OF_TILES("64", "bf16", 32, 32, 33, 34, 35, 36);
    else if constexpr (IS_HALF)
        OF_TILES("128", "f16", 64, 64, 65, 66, 67, 68);
    else
        OF_TILES("128", "bf16", 64, 64, 65, 66, 67, 68);
}

// The same with A in registers.
template <typename T, bool B_OVER_ROWS, int N>
__device__ inline void multiply_registers(float (&c)[N], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 32 || N == 64);
    constexpr bool IS_HALF = std::is_same_v<T, __half>;
    if constexpr (N == 32 && IS_HALF)
        PRODUCT_OF_REGISTERS("64", "f16", ACCUMULATORS_32, OPERANDS_32, "{%32, %33, %34, %35}", "%36", "%37", "%38");
    else if constexpr (N == 32)
        PRODUCT_OF_REGISTERS("64", "bf16", ACCUMULATORS_32, OPERANDS_32, "{%32, %33, %34, %35}", "%36", "%37", "%38");
    else if constexpr (IS_HALF)
        PRODUCT_OF_REGISTERS("128", "f16", ACCUMULATORS_64, OPERANDS_64, "{%64, %65, %66, %67}", "%68", "%69", "%70");
    else
        PRODUCT_OF_REGISTERS("128", "bf16", ACCUMULATORS_64, OPERANDS_64, "{%64, %65, %66, %67}", "%68", "%69", "%70");
}

#undef ACCUMULATORS_32
#undef ACCUMULATORS_64
#undef EIGHT
#undef OPERANDS_32
#undef OPERANDS_64
#undef OF_TILES
#undef PRODUCT_OF_TILES
#undef PRODUCT_OF_REGISTERS
