// The instructions of the GPU that C++ has no words for, one function each (PTX ISA, "Warp-level matrix instructions"
// and "Asynchronous copies"). They need sm_80, `store_matrices` sm_90. tests/kernels/cuda_emulator has the same for a CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Addresses in shared memory are 32-bit numbers here, half the registers of a pointer. This is the block's first; where
// TMA swizzles tiles (hopper/swizzle.cuh) they start at multiples of 1,024.
__device__ inline uint32_t shared_memory() {
    extern __shared__ __align__(1024) unsigned char bytes[];
    return static_cast<uint32_t>(__cvta_generic_to_shared(bytes));
}

template <typename T>
__device__ inline T* shared_pointer(uint32_t address) {
    return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Copy 16 (or 8) bytes from global to shared memory in the background, without passing through registers; where not
// `inside`, write zeros and do not read. Both addresses are multiples of 16 (or 8).
__device__ inline void copy_async_16(uint32_t to, const void* from, bool inside) {
    asm volatile(
        "{ .reg .pred outside;\n"
        "setp.eq.b32 outside, %2, 0;\n"
        "cp.async.cg.shared.global [%0], [%1], 16, outside; }" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(inside))
        : "memory");
}

__device__ inline void copy_async_8(uint32_t to, const void* from, bool inside) {
    asm volatile(
        "{ .reg .pred outside;\n"
        "setp.eq.b32 outside, %2, 0;\n"
        "cp.async.ca.shared.global [%0], [%1], 8, outside; }" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(inside))
        : "memory");
}

// Wait for all the copies of this thread. Other threads see them after the next __syncthreads().
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8. In out[i] it gets the
// elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix i. A row of float32 has four elements in 16 bytes:
// then it gets the element (l / 4, l % 4).
__device__ inline void load_matrices(uint32_t (&out)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
}

// The same of the transposed matrices: lane l gets the elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
__device__ inline void load_matrices_transposed(uint32_t (&out)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(row)
                 : "memory");
}

// The reverse of load_matrices.
__device__ inline void store_matrices(uint32_t row, const uint32_t (&in)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(in[0]), "r"(in[1]),
                 "r"(in[2]), "r"(in[3])
                 : "memory");
}

// C (16 x 8, float32) += A (16 x 16) B (16 x 8), one product of a warp. With g = lane / 4, t = lane % 4, a lane holds
//   a[0..3]: A at rows g, g + 8, g, g + 8, columns 2t and 2t + 1 (a[0], a[1]), 2t + 8 and 2t + 9 (a[2], a[3]);
//   b[0..1]: B at rows 2t and 2t + 1 (b[0]), 2t + 8 and 2t + 9 (b[1]), column g;
//   c[0..3]: C at row g, columns 2t, 2t + 1 (c[0], c[1]), and row g + 8, the same columns (c[2], c[3]).
template <typename T>
__device__ inline void multiply_add_16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (std::is_same_v<T, __half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// x rounded to TF32, the float32 with 10 bits behind the point that tensor cores multiply.
__device__ inline uint32_t to_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// The same of float32 that is TF32: A is 16 x 8 and B 8 x 8, a at columns t (a[0], a[1]) and t + 4 (a[2], a[3]), b at
// rows t and t + 4.
__device__ inline void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^x in one instruction, to about 2 units in the last place; 0 for x = -inf.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two float32 rounded to T, in one register: `low` at the lower address.
template <typename T>
__device__ inline uint32_t pack(float low, float high) {
    union {
        std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair;
        uint32_t bits;
    } u;
    if constexpr (std::is_same_v<T, __half>)
        u.pair = __floats2half2_rn(low, high);
    else
        u.pair = __floats2bfloat162_rn(low, high);
    return u.bits;
}

__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x) {
    if constexpr (std::is_same_v<T, float>)
        return x;
    else if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(x);
    else
        return __float2bfloat16_rn(x);
}
