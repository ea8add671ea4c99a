// The threads of a block in turns, and the barriers between them.
#include "state.h"

Index threadIdx, blockIdx, gridDim;

namespace emulator {

std::string error;
unsigned char* shared;

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

namespace {

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

void together(Together what, const uint32_t* in, uint32_t* out) {
    if (what == Together::load || what == Together::store) {
        const uint32_t lane = current % WARP;
        for (uint32_t i = 0; i < 4; i++) {  // matrix i, whose row lane / 4 is where lane 8 i + lane / 4 says
            const uint32_t given[2] = {in[0], lane ^ (8 * i + lane / 4)};
            uint32_t row;
            together(Together::exchange, given, &row);
            const Element<uint32_t> pair{row + lane % 4 * 4};
            if (what == Together::load)
                out[i] = pair;
            else
                pair = in[1 + i];
        }
        return;
    }
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
