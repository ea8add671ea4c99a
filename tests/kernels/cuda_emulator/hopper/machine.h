// Hopper's asynchronous units on a CPU: loads and stores by TMA, matrix products of a warpgroup, barriers that count
// bytes.
//
// machine.cpp, tma.cpp and products.cpp implement this and emulator.h; the functions of csrc/hopper call it.
#pragma once

#include "../emulator.h"

struct TensorMap {
    char* data;
    int64_t sizes[4], strides[4];  // of D, N, H, B; strides in bytes
    int rows;                      // of a box
};

namespace emulator {

void barrier_initialise(uint32_t address, int arrivals);
void barrier_arrive(uint32_t address, int bytes);
void barrier_wait(uint32_t address, int parity);
void named_barrier(int name, int count, bool waits);
void fence_async();
void set_registers(int count);

void load_tile(uint32_t to, const TensorMap& map, uint32_t barrier, int batch, int head, int row, int column);
void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier);
void store_tile(const TensorMap& map, uint32_t from, int batch, int head, int row, int column);
void add_to_global(float* to, uint32_t from, int bytes);
void commit_stores();
void wait_for_stores();

// A thread's part of a product. c: its n / 2 accumulators. a: its four registers, or null, then a_tile describes A.
struct Product {
    float* c;
    const uint32_t* a;
    uint64_t a_tile, b_tile;
    int n;
    bool add, a_over_rows, b_over_rows, is_bfloat16;
};
void fence_registers();
void multiply(const Product& product);
void commit_products();
void wait_for_products(int pending);

}  // namespace emulator
