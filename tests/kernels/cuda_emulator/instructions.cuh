// The functions of csrc/instructions.cuh for the emulation, documented there.
#pragma once

#include "emulator.h"

#include <type_traits>

inline uint32_t shared_memory() { return 0; }

template <typename T>
inline emulator::Pointer<T> shared_pointer(uint32_t address) {
    return {address};
}

inline void copy_async_16(uint32_t to, const void* from, bool inside) { emulator::copies(to, from, 16, inside); }
inline void copy_async_8(uint32_t to, const void* from, bool inside) { emulator::copies(to, from, 8, inside); }
inline void wait_for_copies() { emulator::wait_for_copies(); }

inline void load_matrices(uint32_t (&out)[4], uint32_t row) {
    emulator::together(emulator::Together::load, &row, out);
}

inline void load_matrices_transposed(uint32_t (&out)[4], uint32_t row) {
    emulator::together(emulator::Together::load_transposed, &row, out);
}

inline void store_matrices(uint32_t row, const uint32_t (&in)[4]) {
    const uint32_t all[5] = {row, in[0], in[1], in[2], in[3]};
    emulator::together(emulator::Together::store, all, nullptr);
}

inline void multiply(emulator::Together what, float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    uint32_t in[10];
    memcpy(in, a, sizeof(a)), memcpy(in + 4, b, sizeof(b)), memcpy(in + 6, c, sizeof(c));
    emulator::together(what, in, reinterpret_cast<uint32_t*>(c));
}

template <typename T>
inline void multiply_add_16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    using emulator::Together;
    multiply(std::is_same_v<T, __half> ? Together::multiply_half : Together::multiply_bfloat16, c, a, b);
}

inline void multiply_add_tf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    multiply(emulator::Together::multiply_tf32, c, a, b);
}

inline uint32_t to_tf32(float x) {
    const uint32_t bits = __float_as_uint(x);
    return std::isfinite(x) ? (bits + 0x1000) & 0xffffe000 : bits;  // halves go away from zero
}

inline float exp2_fast(float x) { return exp2f(x); }

inline float to_float(__half x) { return x; }
inline float to_float(__nv_bfloat16 x) { return x; }

template <typename T>
inline T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    if constexpr (std::is_same_v<T, __half>) return T{static_cast<_Float16>(x)};
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const uint32_t bits = __float_as_uint(x), even = bits >> 16 & 1;  // halves go to the even neighbour
        return T{static_cast<uint16_t>(std::isnan(x) ? 0x7fff : (bits + 0x7fff + even) >> 16)};
    }
}

template <typename T>
inline uint32_t pack(float low, float high) {
    struct Pair {
        T low, high;
    };
    return same_bits<uint32_t>(Pair{from_float<T>(low), from_float<T>(high)});
}
