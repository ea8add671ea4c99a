// csrc/hopper/tma.cuh for the emulation, documented there.
#pragma once

#include "barriers.cuh"
#include "tensor_map.cuh"

inline void fence_async() { emulator::fence_async(); }

inline void load_tile(uint32_t to, const TensorMap& map, Barrier barrier, int batch, int head, int row, int column) {
    emulator::load_tile(to, map, barrier.address, batch, head, row, column);
}
inline void load_bytes(uint32_t to, const void* from, int bytes, Barrier barrier) {
    emulator::load_bytes(to, from, bytes, barrier.address);
}
inline void store_tile(const TensorMap& map, uint32_t from, int batch, int head, int row, int column) {
    emulator::store_tile(map, from, batch, head, row, column);
}
inline void add_to_global(float* to, uint32_t from, int bytes) { emulator::add_to_global(to, from, bytes); }
inline void commit_stores() { emulator::commit_stores(); }
inline void wait_until_stores_have_read() { emulator::wait_for_stores(); }
inline void wait_for_stores() { emulator::wait_for_stores(); }
