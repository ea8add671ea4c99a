// csrc/hopper/wgmma.cuh for the emulation, documented there.
#pragma once

#include "../instructions.cuh"
#include "machine.h"

inline void fence_registers() { emulator::fence_registers(); }
inline void commit_products() { emulator::commit_products(); }

template <int PENDING>
inline void wait_for_products() {
    emulator::wait_for_products(PENDING);
}

template <int N>
inline void claim(float (&)[N]) {}

template <typename T, int N>
inline void operand(uint32_t (&a)[4], const float (&c)[N], int step) {
    for (int i = 0; i < 4; i++) a[i] = pack<T>(c[8 * step + 2 * i], c[8 * step + 2 * i + 1]);
}

template <typename T, bool A_OVER_ROWS, bool B_OVER_ROWS, int N>
inline void multiply_tiles(float (&c)[N], uint64_t a, uint64_t b, bool add) {
    constexpr bool IS_BFLOAT16 = std::is_same_v<T, __nv_bfloat16>;
    emulator::multiply({c, nullptr, a, b, 2 * N, add, A_OVER_ROWS, B_OVER_ROWS, IS_BFLOAT16});
}

template <typename T, bool B_OVER_ROWS, int N>
inline void multiply_registers(float (&c)[N], const uint32_t (&a)[4], uint64_t b, bool add) {
    emulator::multiply({c, a, 0, b, 2 * N, add, false, B_OVER_ROWS, std::is_same_v<T, __nv_bfloat16>});
}
