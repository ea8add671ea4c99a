// What the kernels of both passes have to do: the problem, as Python hands it over, and its division into tiles.
#pragma once

#include "../instructions.cuh"

#include <cmath>

// flash_cuda_hopper.py has the same structure.
struct Problem {
    int64_t batch, heads, key_heads, n_q, n_k, head_size, is_causal;
    int64_t window;          // how many keys a query sees, up to its own; at least n_k if there is no window
    int64_t heads_together;  // so many heads' tiles are computed at a time, so that the L2 cache holds what they share
    int64_t blocks;          // one a multiprocessor
};

// The sizes in a kernel. Queries, keys and tiles are 32-bit numbers.
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

// A tile is a block of rows of one head, counted over the batch. Blocks 0 of some heads come first, then blocks 1, ...
struct TileOf {
    int block, head;

    __device__ TileOf(const Sizes32& x, int tile, int blocks) {
        const int first = tile / (blocks * x.heads_together) * x.heads_together;
        const int together = min(x.heads_together, x.tiles / blocks - first), within = tile - first * blocks;
        block = within / together, head = first + within % together;
    }
};

__host__ __device__ constexpr int blocks_of(int n, int size) { return (n + size - 1) / size; }
