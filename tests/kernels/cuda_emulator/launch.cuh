// csrc/launch.cuh for the emulation: a fault comes back as the error of the launch.
#pragma once

#include "emulator.h"

#include <climits>

template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void*,
                   Arguments... arguments) {
    emulator::run(blocks, threads, shared_bytes, [=] { kernel(arguments...); });
    return emulator::error.empty() ? nullptr : emulator::error.c_str();
}

inline const char* clear(void* data, size_t bytes, void*) {
    memset(data, 0, bytes);
    return nullptr;
}
