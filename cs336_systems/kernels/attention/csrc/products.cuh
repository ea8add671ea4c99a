// Products of a warp, made of the instructions. A float32 product takes several.
#pragma once

#include "instructions.cuh"

// C += A B of float32, and as exact: x is high + low, both TF32, and low low' too small to count. Tensor cores cut sums
// off where others round them, so the sum of many products is made outside.
__device__ inline void multiply_add_float(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    const auto split = [](uint32_t bits, uint32_t& high, uint32_t& low) {
        high = to_tf32(__uint_as_float(bits));
        low = to_tf32(__uint_as_float(bits) - __uint_as_float(high));
    };
    uint32_t a_high[4], a_low[4], b_high[2], b_low[2];
#pragma unroll
    for (int i = 0; i < 4; i++) split(a[i], a_high[i], a_low[i]);
#pragma unroll
    for (int i = 0; i < 2; i++) split(b[i], b_high[i], b_low[i]);
    float sum[4] = {};
    multiply_add_tf32(sum, a_low, b_high);
    multiply_add_tf32(sum, a_high, b_low);
#pragma unroll
    for (int e = 0; e < 4; e++) sum[e] = isnan(sum[e]) ? 0.0f : sum[e];  // the low part of an infinite number is none
    multiply_add_tf32(sum, a_high, b_high);
#pragma unroll
    for (int e = 0; e < 4; e++) c[e] += sum[e];
}

// C += A B: 16-bit A (16 x 16) and B (16 x 8), or float32 A (16 x 8) and B (8 x 8), multiplied as float32 if EXACT and
// otherwise as TF32. `multiply_add_16` and `multiply_add_tf32` say which lane holds which element.
template <typename T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (!std::is_same_v<T, float>) {
        multiply_add_16<T>(c, a, {b0, b1});
    } else if constexpr (EXACT) {
        multiply_add_float(c, a, {b0, b1});
    } else {
        const auto rounded = [](uint32_t bits) { return to_tf32(__uint_as_float(bits)); };
        multiply_add_tf32(c, {rounded(a[0]), rounded(a[1]), rounded(a[2]), rounded(a[3])}, {rounded(b0), rounded(b1)});
    }
}

// Write two neighbours, the first of which is at an even element of an aligned row.
template <typename T>
__device__ inline void store_pair(T* to, float low, float high) {
    if constexpr (std::is_same_v<T, float>)
        *reinterpret_cast<float2*>(to) = {low, high};
    else
        *reinterpret_cast<uint32_t*>(to) = pack<T>(low, high);
}
