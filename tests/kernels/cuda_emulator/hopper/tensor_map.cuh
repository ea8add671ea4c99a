// csrc/hopper/tensor_map.cuh for the emulation, documented there.
#pragma once

#include "../problem.cuh"
#include "machine.h"

template <typename T>
const char* make_tensor_map(TensorMap& map, const View& x, int64_t batch, int64_t heads, int64_t n, int64_t head_size,
                            int rows) {
    static_assert(sizeof(T) == 2);
    const auto bytes = [](int64_t size, int64_t stride) { return size == 1 ? 16 : 2 * stride; };
    map = {static_cast<char*>(x.data),
           {head_size, n, heads, batch},
           {2, bytes(n, x.row_stride), bytes(heads, x.head_stride), bytes(batch, x.batch_stride)},
           rows};
    for (int i = 1; i < 4; i++)
        if (map.strides[i] <= 0 || map.strides[i] % 16 != 0) return "a stride that TMA does not take";
    if (reinterpret_cast<uintptr_t>(x.data) % 16 != 0) return "an address that TMA does not take";
    return x.column_stride == 1 || head_size == 1 ? nullptr : "columns that are not adjacent";
}
