// csrc/hopper/registers.cuh for the emulation, documented there.
#pragma once

#include "machine.h"

template <int REGISTERS>
inline void take_registers() {
    emulator::set_registers(REGISTERS);
}

template <int REGISTERS>
inline void give_registers() {
    emulator::set_registers(REGISTERS);
}

inline uint32_t forget(uint32_t x) { return x; }
