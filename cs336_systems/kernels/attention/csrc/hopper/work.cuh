// The work of both passes: the problem, as Python hands it over, and its division into tiles.
#pragma once

#include "../instructions.cuh"

#include <cmath>

// `_Problem` of flash_cuda_hopper.py.
struct Problem {
    int64_t batch, heads, key_heads, n_q, n_k, head_size, is_causal;
    int64_t window;          // how many keys a query sees, up to its own; at least n_k if there is no window
    int64_t heads_together;  // heads whose tiles are computed at a time, so that the L2 cache holds what they share
    int64_t blocks;          // one for each multiprocessor
};

// The sizes for a kernel, as 32-bit numbers, with the number of tiles and the factor of the scores.
struct Sizes32 {
    int heads, key_heads, n_q, n_k, head_size, is_causal, window, heads_together, tiles;
    float scale;

    explicit Sizes32(const Problem& x, int64_t tiles)
        : heads(static_cast<int>(x.heads)),
          key_heads(static_cast<int>(x.key_heads)),
          n_q(static_cast<int>(x.n_q)),
          n_k(static_cast<int>(x.n_k)),
          head_size(static_cast<int>(x.head_size)),
          is_causal(static_cast<int>(x.is_causal)),
          window(static_cast<int>(x.window)),
          heads_together(static_cast<int>(x.heads_together)),
          tiles(static_cast<int>(tiles)),
          scale(static_cast<float>(1.0 / std::sqrt(static_cast<double>(x.head_size)))) {}
};

// The place of a tile: its head, counted over the batch, and its index among the head's tiles. Tiles 0 of the first
// `heads_together` heads come first, then their tiles 1, ...; then the next heads follow.
struct HeadAndIndex {
    int head, index;

    __device__ HeadAndIndex(const Sizes32& x, int tile, int tiles_per_head) {
        const int first = tile / (tiles_per_head * x.heads_together) * x.heads_together;
        const int together = min(x.heads_together, x.tiles / tiles_per_head - first);
        const int within = tile - first * tiles_per_head;
        index = within / together, head = first + within % together;
    }
};

__host__ __device__ constexpr int ceil_div(int n, int size) { return (n + size - 1) / size; }
