// A block on Hopper: threads that run in turns, and units that work beside them: TMA and the tensor cores.
//
// Nothing here depends on luck. For each 4 bytes of shared memory the machine knows who wrote them last and who has read
// them since, and for each thread what has happened before its present moment, as a vector clock: a time for each thread
// and unit. An access is right if the accesses that it must follow are in the clock of whoever makes it. Arrivals put a
// thread's clock into a barrier, waits take it out. Every asynchronous operation is an access by a unit:
//
//   - loads that a Barrier counts: one unit for each Barrier. Its time enters the Barrier when the bytes have come;
//   - stores: one unit for each warp, in the clock of the thread that waits for them;
//   - products: one unit for each warp, in the clock of each of its threads that waits for them.
//
// The two proxies: a unit may read what a thread wrote only if that thread executed fence_async() after it, and this too
// is in the unit's clock.
//
// Values come as late as they may: loads when every thread waits, stores and products when they are waited for. Until
// then, accumulators hold a large number.
#include "machine.h"

#include <ucontext.h>

#include <map>
#include <memory>
#include <vector>

Index threadIdx, blockIdx, gridDim;

namespace emulator {

std::string error;
unsigned char* shared;

namespace {

using Time = uint32_t;
using Clock = std::vector<Time>;

constexpr int WARP = 32, GROUP = 128, STACK_BYTES = 64 * 1024, GRAIN = 4, BARRIERS = 64, NOBODY = -1;
const uint32_t UNKNOWN = 0x7e5adbad;  // 7e37: any use of it shows

void join(Clock& to, const Clock& from) {
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

std::vector<Thread> threads;
std::vector<Cell> cells;
std::map<uint32_t, MemoryBarrier> barriers;
std::vector<NamedBarrier> named;
std::vector<Load> loads;
std::vector<std::vector<std::unique_ptr<Operation>>> operations;  // of each warpgroup
std::vector<int> registers;                                      // of each warp, a thread
Clock unit_times;
ucontext_t scheduler;
int current, count, shared_size;
bool is_in_thread;
const std::function<void()>* body;

// The first fault is the error; the thread that makes it goes no further.
void fail(const char* what, long number) {
    char text[200];
    snprintf(text, sizeof(text), "%s, %ld, by thread %d of block %u", what, number, current, blockIdx.x);
    if (error.empty()) error = text;
    if (is_in_thread) swapcontext(&threads[current].context, &scheduler);
}

Thread& self() { return threads[current]; }
int product_unit(int warp) { return count + warp; }
int store_unit(int warp) { return count + count / WARP + warp; }
int load_unit(int barrier) { return count + 2 * (count / WARP) + barrier; }
bool is_thread(int by) { return by < count; }
bool is_product(int by) { return by >= count && by < store_unit(0); }
bool is_store(int by) { return by >= store_unit(0) && by < load_unit(0); }

void switch_to_scheduler(State state) {
    self().state = state;
    swapcontext(&self().context, &scheduler);
}

void wait_until(const std::function<bool()>& condition) {
    if (condition()) return;
    self().may_go_on = condition;
    switch_to_scheduler(State::waiting);
}

template <typename F>
void each_cell(uint32_t address, int bytes, F f) {
    if (address + static_cast<int64_t>(bytes) > shared_size) return fail("an address beyond shared memory", address);
    for (uint32_t i = address / GRAIN; i <= (address + bytes - 1) / GRAIN; i++) f(cells[i]);
}

bool has_seen(const Clock& clock, Access x) { return clock[x.by] >= x.time; }

bool has_seen_fence(const Clock& clock, Access x) {
    const auto& fences = threads[x.by].fences;
    const auto next = std::lower_bound(fences.begin(), fences.end(), x.time);
    return next != fences.end() && *next <= clock[x.by];
}

// Whether what was written may be read or replaced: by a thread, or by a unit, which needs the fence.
void follows_write(const Cell& cell, const Clock& clock, bool by_unit, uint32_t address, bool writes) {
    const Access x = cell.writer;
    if (x.by == NOBODY) return;
    if (!has_seen(clock, x)) {
        if (!is_thread(x.by)) return fail(writes ? "shared memory written before the barrier of its load"
                                                 : "shared memory read before the barrier of its load", address);
        return fail(writes ? "shared memory written by two" : "shared memory read without a barrier", address);
    }
    if (by_unit && is_thread(x.by) && !has_seen_fence(clock, x)) fail("shared memory used without fence_async", address);
}

void read_cells(uint32_t address, int bytes, Access by, const Clock& clock) {
    each_cell(address, bytes, [&](Cell& cell) {
        if (!cell.is_written) return fail("shared memory read before it is written", address);
        follows_write(cell, clock, !is_thread(by.by), address, false);
        auto& readers = cell.readers;  // those that this one follows need not be remembered
        readers.erase(std::remove_if(readers.begin(), readers.end(), [&](Access x) { return has_seen(clock, x); }),
                      readers.end());
        readers.push_back(by);
    });
}

void write_cells(uint32_t address, int bytes, Access by, const Clock& clock) {
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

Access now() { return {current, self().clock[current]}; }

void released() { self().clock[current]++; }  // what follows is not in the clock that was given away

MemoryBarrier& barrier_at(uint32_t address) {
    MemoryBarrier& barrier = barriers[address];
    if (barrier.unit == NOBODY) fail("a barrier that is not initialised", address);
    each_cell(address, 8, [&](Cell& cell) { follows_write(cell, self().clock, false, address, false); });
    return barrier;
}

float half_of(uint32_t pair, int which, bool is_bfloat16) {
    const uint16_t bits = pair >> 16 * which;
    return is_bfloat16 ? static_cast<float>(__nv_bfloat16{bits}) : static_cast<float>(same_bits<_Float16>(bits));
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
    uint32_t along_columns(int row, int column) const {
        return swizzled(start + row / 8 * stride + row % 8 * 128 + column * 2);
    }
    uint32_t down_the_rows(int row, int column) const {
        return swizzled(start + row / 8 * stride + row % 8 * 128 + column / 64 * leading + column % 64 * 2);
    }
};

float element(uint32_t address, bool is_bfloat16) {
    uint16_t bits;
    if (address + 2 > static_cast<uint32_t>(shared_size)) return fail("an address beyond shared memory", address), 0.0f;
    memcpy(&bits, shared + address, 2);
    return half_of(bits, 0, is_bfloat16);
}

// f(address) for each 16 bytes of the operands in shared memory.
template <typename F>
void each_chunk(const Product& x, F f) {
    const auto each = [&](uint64_t bits, bool down_the_rows, int n) {
        const Descriptor tile(bits);
        for (int row = 0; row < (down_the_rows ? 16 : n); row++)
            for (int column = 0; column < (down_the_rows ? n : 16); column += 8)
                f(down_the_rows ? tile.down_the_rows(row, column) : tile.along_columns(row, column));
    };
    if (x.a == nullptr) each(x.a_tile, x.a_down_the_rows, 64);
    each(x.b_tile, x.b_down_the_rows, x.n);
}

Sum* sum_of(Thread& thread, float* c) {
    for (Sum& sum : thread.sums)
        if (sum.c == c) return &sum;
    return nullptr;
}

void finish(int group, Operation& x) {
    if (x.is_done) return;
    x.is_done = true;
    const Product& first = x.parts[0];
    const bool is_bfloat16 = first.is_bfloat16;
    static float a[64][16], b[16][256];
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < 16; column++) {
            if (first.a == nullptr) {
                const Descriptor tile(first.a_tile);
                a[row][column] = element(first.a_down_the_rows ? tile.down_the_rows(column, row)
                                                               : tile.along_columns(row, column), is_bfloat16);
            } else {
                const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2, i = row % 16 / 8 + column / 8 * 2;
                a[row][column] = half_of(x.a[thread][i], column % 2, is_bfloat16);
            }
        }
    const Descriptor descriptor(first.b_tile);
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < first.n; n++)
            b[k][n] = element(first.b_down_the_rows ? descriptor.down_the_rows(k, n) : descriptor.along_columns(n, k),
                              is_bfloat16);
    for (int t = 0; t < GROUP; t++) {
        const Product& part = x.parts[t];
        Sum& sum = *sum_of(threads[group * GROUP + t], part.c);
        for (int i = 0; i < part.n / 2; i++) {
            const int row = t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4, column = i / 4 * 8 + t % 4 * 2 + i % 2;
            double total = part.add ? sum.values[i] : 0.0;
            for (int k = 0; k < 16; k++) total += static_cast<double>(a[row][k]) * b[k][column];
            const float nearest = static_cast<float>(total);  // tensor cores do not round but cut off
            const bool is_beyond = std::isfinite(nearest) && std::fabs(nearest) > std::fabs(total);
            sum.values[i] = is_beyond ? std::nextafterf(nearest, 0.0f) : nearest;
        }
    }
}

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

void thread_main() {
    (*body)();
    Thread& thread = self();
    if (!thread.started.empty() || !thread.committed.empty()) fail("stores under way at the end", current);
    if (thread.finished != thread.multiplied) fail("products under way at the end", current);
    switch_to_scheduler(State::done);
}

void exchange(int first) {
    for (int lane = 0; lane < WARP; lane++) {
        Thread& thread = threads[first + lane];
        *thread.out = threads[first + (lane ^ thread.in[1])].in[0];
    }
    for (int lane = 0; lane < WARP; lane++) threads[first + lane].state = State::ready;
}

// Run each thread of a warp until it waits. Whether any of them did anything.
bool run_warp(int first) {
    bool has_run = false;
    for (;;) {
        int at_warp = 0;
        for (int i = first; i < first + WARP && error.empty(); i++) {
            Thread& thread = threads[i];
            if (thread.state == State::waiting && thread.may_go_on()) thread.state = State::ready;
            if (thread.state == State::ready) {
                current = i, threadIdx.x = i;
                is_in_thread = true;
                swapcontext(&scheduler, &thread.context);
                is_in_thread = false;
                has_run = true;
            }
            at_warp += thread.state == State::at_warp;
        }
        if (at_warp < WARP || !error.empty()) return has_run;
        exchange(first);
    }
}

void run_block() {
    memset(shared, 0xff, shared_size);  // NaN
    cells.assign((shared_size + GRAIN - 1) / GRAIN, Cell());
    barriers.clear(), loads.clear(), operations.clear();
    operations.resize(count / GROUP);
    const int width = load_unit(BARRIERS);
    unit_times.assign(width, 0);
    named.assign(16 + count / WARP, NamedBarrier());  // after the sixteen, one for each warp
    for (NamedBarrier& barrier : named) barrier.coming.assign(width, 0), barrier.complete.assign(width, 0);
    registers.assign(count / WARP, 65536 / count / 8 * 8);
    for (int i = 0; i < count; i++) {
        Thread& thread = threads[i];
        thread.state = State::ready;
        thread.clock.assign(width, 0);
        thread.clock[i] = 1;
        thread.fences.clear(), thread.started.clear(), thread.committed.clear(), thread.groups.clear();
        thread.sums.clear();
        thread.registers_fenced = false, thread.multiplied = 0, thread.finished = 0;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, thread_main, 0);
    }
    for (;;) {
        bool has_run = false;
        for (int first = count - WARP; first >= 0 && error.empty(); first -= WARP) has_run |= run_warp(first);
        if (!error.empty()) return;
        int done = 0;
        for (int i = 0; i < count; i++) done += threads[i].state == State::done;
        if (done == count) {
            if (!loads.empty()) fail("loads under way at the end", static_cast<long>(loads.size()));
            return;
        }
        if (has_run) continue;
        if (loads.empty()) return fail("every thread waits", count - done);
        finish_load(0);
    }
}

}  // namespace

void reads(uint32_t address, int bytes) { read_cells(address, bytes, now(), self().clock); }

void writes(uint32_t address, int bytes) {
    if (address % bytes != 0) fail("a misaligned address of shared memory", address);
    write_cells(address, bytes, now(), self().clock);
}

void barrier_initialise(uint32_t address, int arrivals) {
    writes(address, 8);
    MemoryBarrier& barrier = barriers[address];
    if (barrier.unit != NOBODY) fail("a barrier initialised twice", address);
    barrier.unit = load_unit(static_cast<int>(barriers.size()) - 1);
    if (barriers.size() > BARRIERS) fail("more barriers than the emulator counts", BARRIERS);
    barrier.arrivals = barrier.to_come = arrivals;
    barrier.coming.assign(unit_times.size(), 0), barrier.complete = barrier.coming;
}

void barrier_arrive(uint32_t address, int bytes) {
    MemoryBarrier& barrier = barrier_at(address);
    if (barrier.to_come == 0) fail("more arrivals than a barrier expects", address);
    join(barrier.coming, self().clock);
    released();
    barrier.to_come--, barrier.bytes += bytes;
    barrier.finish_phase();
}

void barrier_wait(uint32_t address, int parity) {
    MemoryBarrier& barrier = barrier_at(address);
    wait_until([&barrier, parity] { return (barrier.phases & 1) != parity; });
    join(self().clock, barrier.complete);
}

void named_barrier(int name, int count, bool waits) {
    NamedBarrier& barrier = named[name];
    if (barrier.come > 0 && barrier.count != count) fail("a named barrier for different numbers of threads", count);
    barrier.count = count;
    join(barrier.coming, self().clock);
    released();
    const int round = barrier.rounds;
    if (++barrier.come == count) {
        barrier.come = 0, barrier.rounds++;
        barrier.complete = barrier.coming;
    }
    if (!waits) return;
    wait_until([&barrier, round] { return barrier.rounds > round; });
    join(self().clock, barrier.complete);
}

void wait_for_block() { named_barrier(0, count, true); }

void wait_for_warp() { named_barrier(16 + current / WARP, WARP, true); }

void fence_async() {
    self().fences.push_back(self().clock[current]);
    self().clock[current]++;
}

void set_registers(int number) {
    registers[current / WARP] = number;
    // A warp that takes waits until others have given; in the end they must be enough.
    wait_until([] {
        int sum = 0;
        for (const int each : registers) sum += each * WARP;
        return sum <= 65536;
    });
}

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

void fence_registers() { self().registers_fenced = true; }

void multiply(const Product& product) {
    Thread& thread = self();
    if (!thread.registers_fenced) fail("a product without fence_registers", thread.multiplied);
    const int group = current / GROUP, part = current % GROUP, warp = current / WARP;
    auto& all = operations[group];
    if (thread.multiplied == static_cast<int>(all.size())) all.push_back(std::make_unique<Operation>());
    Operation& x = *all[thread.multiplied++];
    x.parts[part] = product;
    if (product.a != nullptr) memcpy(x.a[part], product.a, sizeof(x.a[part]));
    if (x.come++ == 0)
        x.clock = thread.clock;
    else
        for (size_t i = 0; i < x.clock.size(); i++) x.clock[i] = std::min(x.clock[i], thread.clock[i]);
    const int unit = product_unit(warp);
    if (current % WARP == 0) x.times[part / WARP] = ++unit_times[unit];

    // The accumulators: from the first product on until the wait the thread sees UNKNOWN.
    Sum* sum = sum_of(thread, product.c);
    if (sum == nullptr) {
        thread.sums.push_back({product.c, std::vector<float>(product.c, product.c + product.n / 2), 0});
        sum = &thread.sums.back();
        for (int i = 0; i < product.n / 2; i++) product.c[i] = __uint_as_float(UNKNOWN);
    }
    sum->under_way++;

    if (x.come < GROUP) return;
    for (const Product& each : x.parts)
        if (each.a_tile != x.parts[0].a_tile || each.b_tile != x.parts[0].b_tile || each.add != x.parts[0].add)
            return fail("threads of a warpgroup at different products", thread.multiplied);
    for (int w = 0; w < 4; w++)
        each_chunk(x.parts[0], [&](uint32_t address) {
            if (address % 16 != 0) return fail("an operand that is not aligned", address);
            read_cells(address, 16, {product_unit(group * 4 + w), x.times[w]}, x.clock);
        });
}

void commit_products() {
    self().groups.push_back(self().multiplied);
    self().registers_fenced = false;
}

void wait_for_products(int pending) {
    Thread& thread = self();
    const int group = current / GROUP, part = current % GROUP;
    const int until = static_cast<int>(thread.groups.size()) > pending ? thread.groups[thread.groups.size() - 1 - pending] : 0;
    auto& all = operations[group];
    wait_until([&all, until, first = thread.finished] {
        for (int i = first; i < until; i++)
            if (all[i]->come < GROUP) return false;
        return true;
    });
    for (; thread.finished < until; thread.finished++) {
        Operation& x = *all[thread.finished];
        finish(group, x);
        const Product& product = x.parts[part];
        if (product.a != nullptr && memcmp(product.a, x.a[part], sizeof(x.a[part])) != 0)
            fail("an operand in registers written while a product reads it", thread.finished);
        const int unit = product_unit(current / WARP);
        thread.clock[unit] = std::max(thread.clock[unit], x.times[part / WARP]);
        Sum& sum = *sum_of(thread, product.c);
        if (--sum.under_way > 0) continue;
        for (int i = 0; i < product.n / 2; i++)
            if (__float_as_uint(product.c[i]) != UNKNOWN) fail("an accumulator written while a product adds to it", i);
        memcpy(product.c, sum.values.data(), sum.values.size() * sizeof(float));
        thread.sums.erase(thread.sums.begin() + (&sum - thread.sums.data()));
    }
}

void together(Together what, const uint32_t* in, uint32_t* out) {
    if (what != Together::exchange) fail("an instruction that the machine does not have", static_cast<long>(what));
    self().what = what, self().in = in, self().out = out;
    switch_to_scheduler(State::at_warp);
}

void run(int64_t blocks, int thread_count, int shared_bytes, const std::function<void()>& thread) {
    error.clear();
    count = thread_count;
    gridDim.x = static_cast<unsigned>(blocks);
    if (count > static_cast<int>(threads.size())) threads.resize(count);
    const std::unique_ptr<unsigned char[]> memory(new unsigned char[std::max(shared_bytes, 1)]);
    shared = memory.get(), shared_size = shared_bytes, body = &thread;
    for (int64_t block = 0; block < blocks && error.empty(); block++) {
        blockIdx.x = static_cast<unsigned>(block);
        run_block();
    }
}

void copies(uint32_t, const void*, int, bool) { fail("an instruction that the machine does not have", 0); }
void wait_for_copies() { fail("an instruction that the machine does not have", 1); }

}  // namespace emulator
