// csrc/hopper/barriers.cuh for the emulation, documented there.
#pragma once

#include "../instructions.cuh"
#include "machine.h"

struct Barrier {
    static constexpr int BYTES = 8;
    uint32_t address;
    void initialise(int arrivals) const { emulator::barrier_initialise(address, arrivals); }
    void arrive() const { emulator::barrier_arrive(address, 0); }
    void expect(int bytes) const { emulator::barrier_arrive(address, bytes); }
    void wait(int parity) const { emulator::barrier_wait(address, parity); }
};

inline void meet(int name, int threads) { emulator::named_barrier(name, threads, true); }
inline void arrive(int name, int threads) { emulator::named_barrier(name, threads, false); }
