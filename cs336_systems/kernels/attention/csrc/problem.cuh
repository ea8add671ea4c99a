// Tensors and sizes as Python hands them over: `View` of flash_cuda_build.py, `_Sizes` of flash_cuda_ampere.py.
#pragma once

#include <cstdint>

// A tensor (B, H, N, D).
struct View {
    void* data;
    int64_t batch_stride, head_stride, row_stride, column_stride;  // in elements
    int64_t vectorised;  // whether rows are whole, aligned chunks of 16 bytes; set by `checked` of tiles.cuh
};

struct Sizes {
    int64_t batch, heads, n_q, n_k, head_size, is_causal;
};
