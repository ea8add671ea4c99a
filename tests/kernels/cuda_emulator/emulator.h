// A GPU's block on a CPU: the parts of CUDA that the kernels of csrc/ use, and the emulated instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>

#define __device__
#define __global__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__

using std::isnan;
using std::max;
using std::min;

struct Index {
    unsigned x;
};
extern Index threadIdx, blockIdx, gridDim;

template <typename To, typename From>
inline To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }

struct float2 {
    float x, y;
};

struct float4 {
    float x, y, z, w;
};

struct __half {
    _Float16 value;
    operator float() const { return static_cast<float>(value); }
};

struct __nv_bfloat16 {
    uint16_t bits;
    operator float() const { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
};

namespace emulator {

// Run a kernel's blocks one after another, the threads of a block in turns. `error` is the first thing found wrong.
void run(int64_t blocks, int threads, int shared_bytes, const std::function<void()>& thread);
extern std::string error;

extern unsigned char* shared;  // the block's memory
void reads(uint32_t address, int bytes);
void writes(uint32_t address, int bytes);
void copies(uint32_t to, const void* from, int bytes, bool inside);  // until the thread waits
void wait_for_copies();
void wait_for_block();
void wait_for_warp();

// An operation of the 32 lanes of a warp together: each gives `in` and gets `out` when all have arrived.
enum class Together { load, load_transposed, store, multiply_half, multiply_bfloat16, multiply_tf32, exchange };
void together(Together what, const uint32_t* in, uint32_t* out);

// An element in shared memory, which sees who reads and writes it.
template <typename T>
struct Element {
    uint32_t address;
    operator T() const {
        reads(address, sizeof(T));
        T value;
        memcpy(&value, shared + address, sizeof(T));
        return value;
    }
    void operator=(T value) const {
        writes(address, sizeof(T));
        memcpy(shared + address, &value, sizeof(T));
    }
};

template <typename T>
struct Pointer {
    uint32_t address;
    Element<T> operator*() const { return {address}; }
    Element<T> operator[](int i) const { return {address + i * static_cast<uint32_t>(sizeof(T))}; }
};

}  // namespace emulator

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp() { emulator::wait_for_warp(); }

inline float __shfl_xor_sync(unsigned, float x, uint32_t mask) {
    const uint32_t in[2] = {__float_as_uint(x), mask};
    uint32_t out;
    emulator::together(emulator::Together::exchange, in, &out);
    return __uint_as_float(out);
}

inline uint32_t __shfl_sync(unsigned, uint32_t x, uint32_t lane) {
    const uint32_t in[2] = {x, threadIdx.x % 32 ^ lane};
    uint32_t out;
    emulator::together(emulator::Together::exchange, in, &out);
    return out;
}

inline bool __any_sync(unsigned, bool x) {
    float any = x;
    for (int mask = 1; mask < 32; mask *= 2) any = fmaxf(any, __shfl_xor_sync(0xffffffff, any, mask));
    return any != 0;
}

inline int atomicAdd(int* to, int x) {  // one thread runs at a time
    const int before = *to;
    *to += x;
    return before;
}
