// Threads of a block are contexts that this one switches between: each runs until it waits for its warp or its block.
//
// Warps run in an order that a GPU may take, and copies finish as late as they may, so that reads come too early if a
// wait is missing. The emulator records which threads wrote and read every 4 bytes of shared memory since the last
// barrier. If one of two threads writes, they need a barrier between them, as in compute-sanitizer's racecheck.
#include "emulator.h"

#include <ucontext.h>

#include <memory>
#include <vector>

Index threadIdx, blockIdx, gridDim;

namespace emulator {

std::string error;
unsigned char* shared;

namespace {

constexpr int WARP = 32, STACK_BYTES = 64 * 1024, GRAIN = 4;
constexpr int NOBODY = -1, SEVERAL = -2;

struct Copy {
    uint32_t to;
    const void* from;
    int bytes;
    bool inside;
};

enum class State { ready, at_warp, at_block, done };

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    State state;
    std::vector<Copy> under_way;
    Together what;
    const uint32_t* in;
    uint32_t* out;
};

struct Cell {
    bool is_written = false, is_pending = false;
    int writer = NOBODY, reader = NOBODY;  // since the last barrier
};

std::vector<Thread> threads;
std::vector<Cell> cells;
ucontext_t scheduler;
int current, shared_size;
const std::function<void()>* body;

void fail(const char* what, long number) {
    if (!error.empty()) return;
    char text[200];
    snprintf(text, sizeof(text), "%s, %ld, by thread %d of block %u", what, number, current, blockIdx.x);
    error = text;
}

bool is_inside(uint32_t address, int bytes) {
    if (address % bytes != 0) fail("a misaligned address of shared memory", address);
    if (address + static_cast<int64_t>(bytes) <= shared_size) return true;
    fail("an address beyond shared memory", address);
    return false;
}

template <typename F>
void each_cell(uint32_t address, int bytes, F f) {
    for (uint32_t i = address / GRAIN; i <= (address + bytes - 1) / GRAIN; i++) f(cells[i]);
}

void switch_to_scheduler(State state) {
    threads[current].state = state;
    swapcontext(&threads[current].context, &scheduler);
}

void thread_main() {
    (*body)();
    if (!threads[current].under_way.empty()) fail("copies under way at the end", threads[current].under_way.size());
    switch_to_scheduler(State::done);
}

void run_thread(int i) {
    current = i;
    threadIdx.x = i;
    swapcontext(&scheduler, &threads[i].context);
}

uint16_t element(const Thread* lanes, int matrix, int row, int column) {
    uint16_t value = 0;
    const uint32_t address = lanes[8 * matrix + row].in[0] + 2 * column;
    if (address + 2 <= static_cast<uint32_t>(shared_size)) memcpy(&value, shared + address, 2);
    return value;
}

void load(Thread* lanes, bool transposed) {
    for (int matrix = 0; matrix < 4; matrix++) {
        unsigned banks = 0;  // eight rows of 16 bytes fill the 32 banks of 4 bytes, each in a place of its own
        for (int row = 0; row < 8; row++) banks |= 1u << lanes[8 * matrix + row].in[0] / 16 % 8;
        if (banks != 0xff) fail("rows of a matrix in the same banks", lanes[8 * matrix].in[0]);
    }
    for (int lane = 0; lane < WARP; lane++) {
        current = static_cast<int>(lanes - threads.data()) + lane;
        reads(lanes[lane].in[0], 16);
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int matrix = 0; matrix < 4; matrix++) {
            const int g = lane / 4, t = lane % 4 * 2;
            const uint32_t low = transposed ? element(lanes, matrix, t, g) : element(lanes, matrix, g, t);
            const uint32_t high = transposed ? element(lanes, matrix, t + 1, g) : element(lanes, matrix, g, t + 1);
            lanes[lane].out[matrix] = low | high << 16;
        }
}

float half_of(uint32_t pair, int which, bool is_bfloat16) {
    const uint16_t bits = pair >> 16 * which;
    return is_bfloat16 ? static_cast<float>(__nv_bfloat16{bits}) : static_cast<float>(same_bits<_Float16>(bits));
}

void multiply(Thread* lanes, Together what) {
    const bool is_tf32 = what == Together::multiply_tf32, is_bfloat16 = what == Together::multiply_bfloat16;
    double a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; lane++) {
        const int g = lane / 4, t = lane % 4;
        const uint32_t* in = lanes[lane].in;
        for (int i = 0; i < 6 && is_tf32; i++)
            if (in[i] & 0x1fff && std::isfinite(__uint_as_float(in[i]))) fail("a number that is not TF32", in[i]);
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < (is_tf32 ? 1 : 2); h++) {
                const int row = g + i % 2 * 8, column = is_tf32 ? t + i / 2 * 4 : 2 * t + h + i / 2 * 8;
                a[row][column] = is_tf32 ? __uint_as_float(in[i]) : half_of(in[i], h, is_bfloat16);
                if (i < 2) b[is_tf32 ? t + i * 4 : 2 * t + h + i * 8][g] =
                    is_tf32 ? __uint_as_float(in[4 + i]) : half_of(in[4 + i], h, is_bfloat16);
            }
    }
    for (int lane = 0; lane < WARP; lane++)
        for (int e = 0; e < 4; e++) {
            double sum = __uint_as_float(lanes[lane].in[6 + e]);
            for (int k = 0; k < (is_tf32 ? 8 : 16); k++) sum += a[lane / 4 + e / 2 * 8][k] * b[k][lane % 4 * 2 + e % 2];
            const float nearest = static_cast<float>(sum);  // a GPU does not round but cut off
            const bool is_beyond = std::isfinite(nearest) && std::fabs(nearest) > std::fabs(sum);
            lanes[lane].out[e] = __float_as_uint(is_beyond ? std::nextafterf(nearest, 0.0f) : nearest);
        }
}

void do_together(int first) {
    Thread* lanes = &threads[first];
    current = first;
    for (int lane = 1; lane < WARP; lane++)
        if (lanes[lane].what != lanes->what) return fail("lanes of a warp at different instructions", lane);
    if (lanes->what == Together::exchange) {
        for (int lane = 0; lane < WARP; lane++) *lanes[lane].out = lanes[lane ^ lanes[lane].in[1]].in[0];
    } else if (lanes->what == Together::load || lanes->what == Together::load_transposed) {
        load(lanes, lanes->what == Together::load_transposed);
    } else {
        multiply(lanes, lanes->what);
    }
}

// Run a warp until all of it waits for the block, or is done. False where some of its lanes wait for the others.
bool run_warp(int first) {
    for (;;) {
        int waiting = 0;
        for (int i = first; i < first + WARP; i++) {
            if (threads[i].state == State::ready) run_thread(i);
            waiting += threads[i].state == State::at_warp;
        }
        if (waiting == 0) return true;
        if (waiting < WARP) return false;
        do_together(first);
        for (int i = first; i < first + WARP; i++) threads[i].state = State::ready;
    }
}

void run_block(int count) {
    memset(shared, 0xff, shared_size);  // NaN
    cells.assign((shared_size + GRAIN - 1) / GRAIN, Cell());
    for (int i = 0; i < count; i++) {
        Thread& thread = threads[i];
        thread.state = State::ready;
        thread.under_way.clear();
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, thread_main, 0);
    }
    for (;;) {
        for (int first = count - WARP; first >= 0; first -= WARP)
            if (!run_warp(first)) return fail("lanes of a warp that do not meet", first);
        int done = 0;
        for (int i = 0; i < count; i++) done += threads[i].state == State::done;
        if (done == count) return;
        if (done > 0) return fail("threads that end where others wait for the block", done);
        for (int i = 0; i < count; i++) threads[i].state = State::ready;
        for (Cell& cell : cells) cell.writer = cell.reader = NOBODY;
    }
}

}  // namespace

void reads(uint32_t address, int bytes) {
    if (!is_inside(address, bytes)) return;
    each_cell(address, bytes, [&](Cell& cell) {
        if (!cell.is_written) fail("shared memory read before it is written", address);
        if (cell.is_pending) fail("shared memory read while it is copied to", address);
        if (cell.writer != NOBODY && cell.writer != current) fail("shared memory read without a barrier", address);
        cell.reader = cell.reader == NOBODY || cell.reader == current ? current : SEVERAL;
    });
}

void writes(uint32_t address, int bytes) {
    if (!is_inside(address, bytes)) return;
    each_cell(address, bytes, [&](Cell& cell) {
        if (cell.is_pending) fail("shared memory written while it is copied to", address);
        if (cell.writer != NOBODY && cell.writer != current) fail("shared memory written by two", address);
        if (cell.reader != NOBODY && cell.reader != current) fail("shared memory written while it is read", address);
        cell.is_written = true;
        cell.writer = current;
    });
}

void copies(uint32_t to, const void* from, int bytes, bool inside) {
    if (inside && reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("a copy from a misaligned address", bytes);
    writes(to, bytes);
    if (!is_inside(to, bytes)) return;
    each_cell(to, bytes, [](Cell& cell) { cell.is_pending = true; });
    threads[current].under_way.push_back({to, from, bytes, inside});
}

void wait_for_copies() {
    for (const Copy& copy : threads[current].under_way) {
        if (copy.inside)
            memcpy(shared + copy.to, copy.from, copy.bytes);
        else
            memset(shared + copy.to, 0, copy.bytes);
        each_cell(copy.to, copy.bytes, [](Cell& cell) {
            cell.is_pending = false;
            cell.writer = current;
        });
    }
    threads[current].under_way.clear();
}

void wait_for_block() { switch_to_scheduler(State::at_block); }

void together(Together what, const uint32_t* in, uint32_t* out) {
    threads[current].what = what, threads[current].in = in, threads[current].out = out;
    switch_to_scheduler(State::at_warp);
}

void run(int64_t blocks, int count, int shared_bytes, const std::function<void()>& thread) {
    error.clear();
    gridDim.x = static_cast<unsigned>(blocks);
    if (count > static_cast<int>(threads.size())) threads.resize(count);
    const std::unique_ptr<unsigned char[]> memory(new unsigned char[shared_bytes]);
    shared = memory.get(), shared_size = shared_bytes, body = &thread;
    for (int64_t block = 0; block < blocks && error.empty(); block++) {
        blockIdx.x = static_cast<unsigned>(block);
        run_block(count);
    }
}

}  // namespace emulator
