// A block on Hopper: threads that run in turns, and units that work beside them: TMA and the tensor cores.
//
// Nothing here depends on luck. For each 4 bytes of shared memory the machine knows who wrote them last and who has
// read them since, and for each thread what has happened before its present moment, as a vector clock: a time for each
// thread and unit. An access is right if the accesses that it must follow are in the clock of whoever makes it.
// Arrivals put a thread's clock into a barrier, waits take it out. Every asynchronous operation is an access by a unit:
//
//   - loads that a Barrier counts: one unit for each Barrier. Its time enters the Barrier when the bytes have come;
//   - stores: one unit for each warp, in the clock of the thread that waits for them;
//   - products: one unit for each warp, in the clock of each of its threads that waits for them.
//
// The two proxies: a unit may read what a thread wrote only if that thread executed fence_async() after it, and this
// too is in the unit's clock.
//
// Values come as late as they may: loads when every thread waits, stores and products when they are waited for. Until
// then, accumulators hold a large number.
#pragma once

#include "machine.h"

#include <ucontext.h>

#include <map>
#include <memory>
#include <vector>

namespace emulator {

using Time = uint32_t;
using Clock = std::vector<Time>;

constexpr int WARP = 32, GROUP = 128, STACK_BYTES = 64 * 1024, GRAIN = 4, BARRIERS = 64, NOBODY = -1;
const uint32_t UNKNOWN = 0x7e5adbad;  // 7e37: any use of it shows

inline void join(Clock& to, const Clock& from) {
    for (size_t i = 0; i < to.size(); i++) to[i] = std::max(to[i], from[i]);
}

struct Access {
    int by = NOBODY;
    Time time = 0;
};

struct Cell {
    bool is_written = false;
    Access writer;
    std::vector<Access> readers;  // since it was written
};

struct MemoryBarrier {
    int unit = NOBODY, arrivals = 0, to_come = 0, phases = 0;
    int64_t bytes = 0;
    Clock coming, complete;
    void finish_phase() {
        if (to_come > 0 || bytes != 0) return;
        to_come = arrivals, phases++;
        complete = coming;
    }
};

struct NamedBarrier {
    int come = 0, count = 0, rounds = 0;
    Clock coming, complete;
};

struct Load {
    uint32_t to, barrier;
    std::vector<unsigned char> bytes;  // TMA reads global memory, which no thread writes, at once
    Time time;
    Clock clock;
};

struct Store {
    char* to;
    uint32_t from;
    int bytes;
    bool is_sum;
};

struct Operation {  // a product of a warpgroup
    Product parts[GROUP];
    uint32_t a[GROUP][4];
    int come = 0;
    bool is_done = false;
    Time times[4];
    Clock clock;  // what all its threads have seen
};

struct Sum {  // an accumulator that products add to: its true values
    float* c;
    std::vector<float> values;
    int under_way;
};

enum class State { ready, at_warp, waiting, done };

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    State state;
    std::function<bool()> may_go_on;
    Together what;
    const uint32_t* in;
    uint32_t* out;
    Clock clock;
    std::vector<Time> fences;
    std::vector<Store> started, committed;
    bool registers_fenced;
    int multiplied, finished;  // products of the warpgroup that this thread has taken part in, and waited for
    std::vector<int> groups;   // for each group of products the number up to its end
    std::vector<Sum> sums;
};

extern std::vector<Thread> threads;
extern std::vector<Cell> cells;
extern std::map<uint32_t, MemoryBarrier> barriers;
extern std::vector<NamedBarrier> named;
extern std::vector<Load> loads;
extern std::vector<std::vector<std::unique_ptr<Operation>>> operations;  // of each warpgroup
extern std::vector<int> registers;                                      // of each warp, a thread
extern Clock unit_times;
extern ucontext_t scheduler;
extern int current, count, shared_size;
extern bool is_in_thread;
extern const std::function<void()>* body;

void fail(const char* what, long number);  // the first fault is the error; the thread that makes it goes no further
void finish_load(size_t i);

inline Thread& self() { return threads[current]; }
inline int product_unit(int warp) { return count + warp; }
inline int store_unit(int warp) { return count + count / WARP + warp; }
inline int load_unit(int barrier) { return count + 2 * (count / WARP) + barrier; }
inline bool is_thread(int by) { return by < count; }
inline bool is_product(int by) { return by >= count && by < store_unit(0); }
inline bool is_store(int by) { return by >= store_unit(0) && by < load_unit(0); }

inline void switch_to_scheduler(State state) {
    self().state = state;
    swapcontext(&self().context, &scheduler);
}

inline void wait_until(const std::function<bool()>& condition) {
    if (condition()) return;
    self().may_go_on = condition;
    switch_to_scheduler(State::waiting);
}

template <typename F>
inline void each_cell(uint32_t address, int bytes, F f) {
    if (address + static_cast<int64_t>(bytes) > shared_size) return fail("an address beyond shared memory", address);
    for (uint32_t i = address / GRAIN; i <= (address + bytes - 1) / GRAIN; i++) f(cells[i]);
}

inline bool has_seen(const Clock& clock, Access x) { return clock[x.by] >= x.time; }

inline bool has_seen_fence(const Clock& clock, Access x) {
    const auto& fences = threads[x.by].fences;
    const auto next = std::lower_bound(fences.begin(), fences.end(), x.time);
    return next != fences.end() && *next <= clock[x.by];
}

// Whether what was written may be read or replaced: by a thread, or by a unit, which needs the fence.
inline void follows_write(const Cell& cell, const Clock& clock, bool by_unit, uint32_t address, bool writes) {
    const Access x = cell.writer;
    if (x.by == NOBODY) return;
    if (!has_seen(clock, x)) {
        if (!is_thread(x.by)) return fail(writes ? "shared memory written before the barrier of its load"
                                                 : "shared memory read before the barrier of its load", address);
        return fail(writes ? "shared memory written by two" : "shared memory read without a barrier", address);
    }
    if (by_unit && is_thread(x.by) && !has_seen_fence(clock, x))
        fail("shared memory used without fence_async", address);
}

inline void read_cells(uint32_t address, int bytes, Access by, const Clock& clock) {
    each_cell(address, bytes, [&](Cell& cell) {
        if (!cell.is_written) return fail("shared memory read before it is written", address);
        follows_write(cell, clock, !is_thread(by.by), address, false);
        auto& readers = cell.readers;  // those that this one follows need not be remembered
        readers.erase(std::remove_if(readers.begin(), readers.end(), [&](Access x) { return has_seen(clock, x); }),
                      readers.end());
        readers.push_back(by);
    });
}

inline void write_cells(uint32_t address, int bytes, Access by, const Clock& clock) {
    each_cell(address, bytes, [&](Cell& cell) {
        follows_write(cell, clock, !is_thread(by.by), address, true);
        for (const Access x : cell.readers) {
            if (x.by == by.by || has_seen(clock, x)) continue;
            fail(is_product(x.by) ? "an operand written while a product reads it"
                 : is_store(x.by) ? "shared memory written before a store has read it"
                                  : "shared memory written while it is read",
                 address);
        }
        cell.is_written = true, cell.writer = by, cell.readers.clear();
    });
}

inline Access now() { return {current, self().clock[current]}; }

inline void released() { self().clock[current]++; }  // what follows is not in the clock that was given away

inline MemoryBarrier& barrier_at(uint32_t address) {
    MemoryBarrier& barrier = barriers[address];
    if (barrier.unit == NOBODY) fail("a barrier that is not initialised", address);
    each_cell(address, 8, [&](Cell& cell) { follows_write(cell, self().clock, false, address, false); });
    return barrier;
}

// What a descriptor says, as the PTX manual does: the address of element (row, column) of 64 x 16 or N x 16, where the
// product adds over columns, or of 16 x N, where it adds over rows.
struct Descriptor {
    uint32_t start, leading, stride;

    explicit Descriptor(uint64_t bits) {
        start = (bits & 0x3fff) * 16, leading = (bits >> 16 & 0x3fff) * 16, stride = (bits >> 32 & 0x3fff) * 16;
        if (bits >> 62 != 1) fail("a descriptor without the swizzle of 128 bytes", static_cast<long>(bits >> 62));
        if (bits >> 49 & 7) fail("a descriptor with an offset of its base", static_cast<long>(bits >> 49 & 7));
    }
    static uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }
    uint32_t over_columns(int row, int column) const {
        return swizzled(start + row / 8 * stride + row % 8 * 128 + column * 2);
    }
    uint32_t over_rows(int row, int column) const {
        return swizzled(start + row / 8 * stride + row % 8 * 128 + column / 64 * leading + column % 64 * 2);
    }
};

}  // namespace emulator
