// TMA: loads and stores of boxes of a tensor and of bytes, sums in global memory.
#include "state.h"

namespace emulator {

void finish_load(size_t i) {
    const Load load = loads[i];
    loads.erase(loads.begin() + static_cast<long>(i));
    memcpy(shared + load.to, load.bytes.data(), load.bytes.size());
    MemoryBarrier& barrier = barriers[load.barrier];
    join(barrier.coming, load.clock);
    barrier.coming[barrier.unit] = std::max(barrier.coming[barrier.unit], load.time);
    barrier.bytes -= static_cast<int64_t>(load.bytes.size());
    barrier.finish_phase();
}

namespace {

void start_load(uint32_t to, uint32_t barrier, std::vector<unsigned char> bytes) {
    MemoryBarrier& counted = barrier_at(barrier);
    each_cell(barrier, 8, [&](Cell& cell) { follows_write(cell, self().clock, true, barrier, false); });
    const Time time = ++unit_times[counted.unit];
    write_cells(to, static_cast<int>(bytes.size()), {counted.unit, time}, self().clock);
    loads.push_back({to, barrier, std::move(bytes), time, self().clock});
}

// f(pointer in global memory or null, offset in shared memory before the swizzle) for each element of a box.
template <typename F>
void each_of_box(const TensorMap& map, int batch, int head, int row, int column, F f) {
    for (int r = 0; r < map.rows; r++)
        for (int c = 0; c < 64; c++) {
            const int64_t at[4] = {column + c, row + r, head, batch};
            char* element = map.data;
            for (int i = 0; i < 4; i++) {
                if (at[i] < 0 || at[i] >= map.sizes[i]) element = nullptr;
                if (element != nullptr) element += at[i] * map.strides[i];
            }
            f(element, r * 128 + c * 2);
        }
}

void check_box(uint32_t address) {
    if (address % 1024 != 0) fail("a swizzled tile that does not start at a multiple of 1024", address);
}

void start_store(char* to, uint32_t from, int bytes, bool is_sum) {
    const int unit = store_unit(current / WARP);
    read_cells(from, bytes, {unit, ++unit_times[unit]}, self().clock);
    self().started.push_back({to, from, bytes, is_sum});
}

}  // namespace

void load_tile(uint32_t to, const TensorMap& map, uint32_t barrier, int batch, int head, int row, int column) {
    check_box(to);
    std::vector<unsigned char> bytes(map.rows * 128);
    each_of_box(map, batch, head, row, column, [&](const char* from, uint32_t offset) {
        if (from != nullptr) memcpy(&bytes[Descriptor::swizzled(offset)], from, 2);
    });
    start_load(to, barrier, std::move(bytes));
}

void load_bytes(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    if (to % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
        fail("a load that is not of aligned 16 bytes", to);
    const auto* first = static_cast<const unsigned char*>(from);
    start_load(to, barrier, std::vector<unsigned char>(first, first + bytes));
}

void store_tile(const TensorMap& map, uint32_t from, int batch, int head, int row, int column) {
    check_box(from);
    const int unit = store_unit(current / WARP);
    read_cells(from, map.rows * 128, {unit, ++unit_times[unit]}, self().clock);
    each_of_box(map, batch, head, row, column, [&](char* to, uint32_t offset) {
        if (to != nullptr) self().started.push_back({to, from + Descriptor::swizzled(offset), 2, false});
    });
}

void add_to_global(float* to, uint32_t from, int bytes) {
    if (from % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
        fail("a sum that is not of aligned 16 bytes", from);
    start_store(reinterpret_cast<char*>(to), from, bytes, true);
}

void commit_stores() {
    Thread& thread = self();
    thread.committed.insert(thread.committed.end(), thread.started.begin(), thread.started.end());
    thread.started.clear();
}

void wait_for_stores() {
    Thread& thread = self();
    for (const Store& store : thread.committed) {
        if (!store.is_sum) {
            memcpy(store.to, shared + store.from, store.bytes);
            continue;
        }
        for (int i = 0; i < store.bytes; i += 4) {
            float x, y;
            memcpy(&x, store.to + i, 4), memcpy(&y, shared + store.from + i, 4);
            x += y;
            memcpy(store.to + i, &x, 4);
        }
    }
    thread.committed.clear();
    const int unit = store_unit(current / WARP);
    if (thread.started.empty()) thread.clock[unit] = std::max(thread.clock[unit], unit_times[unit]);
}

}  // namespace emulator
