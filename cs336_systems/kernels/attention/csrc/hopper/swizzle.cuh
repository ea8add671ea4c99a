// Tiles of 16-bit numbers in shared memory, in the layout that TMA writes and matrix products read.
//
// A tile of ROWS x COLUMNS is a row of blocks, each of ROWS x 64 numbers: 128 bytes a row. Eight rows are 1,024 bytes,
// an atom. Were they stored plainly, a column of 16-byte chunks would lie in the same four of the 32 banks. So TMA puts
// chunk c of row r at place c ^ (r % 8):
//
//     row 0    0 1 2 3 4 5 6 7        The hardware does not know rows. It changes addresses: bits 4-6 (the chunk)
//     row 1    1 0 3 2 5 4 7 6        become their exclusive or with bits 7-9 (the row). So an atom has to start at a
//     row 2    2 3 0 1 6 7 4 5        multiple of 1,024 bytes, and all address arithmetic below is done before this
//     ...                             change.
//     row 7    7 6 5 4 3 2 1 0
//
// A matrix product reads its operands by descriptors, 64 bits:
//
//     bits  0-13   address / 16
//     bits 16-29   "leading" byte offset / 16
//     bits 32-45   "stride" byte offset / 16
//     bits 62-63   swizzle: 1 is 128 bytes
//
// A product of A (M x K) and B (K x N) adds over K, 16 at a time. The tile can lie in two ways:
//
//   - K along the rows (`along_columns`): q and k in the scores q k^T, whose sum is over the head's 64 or 128 numbers.
//     A group of 8 rows is an atom; "stride" is the way to the next 8 rows, 1,024 bytes. "Leading" is not used. 16 of K
//     are 32 bytes, so step s of a block begins 32 s bytes further, in the middle of an atom: the change of address
//     bits makes this right.
//   - K down the rows (`along_rows`): v in the output p v, whose sum is over keys. The product is told that the operand
//     is transposed. "Stride" is the way to the next 8 of K, 1,024 bytes; "leading" is the way to the next 64 of N, the
//     next block. 16 of K are two atoms.
#pragma once

#include "../instructions.cuh"

template <int ROWS, int COLUMNS>
struct SwizzledTile {
    static constexpr int BLOCK_BYTES = ROWS * 128, BYTES = COLUMNS / 64 * BLOCK_BYTES, ATOM = 1024;
    static_assert(ROWS % 8 == 0 && COLUMNS % 64 == 0);

    uint32_t address;  // a multiple of ATOM

    // The address of a block of 64 columns, which TMA moves at a time.
    __device__ uint32_t block(int i) const { return address + i * BLOCK_BYTES; }

    // The address of an element, for ordinary loads and stores.
    __device__ uint32_t at(int row, int column) const {
        return block(column / 64) + row * 128 + ((column % 64 / 8) ^ (row % 8)) * 16 + column % 8 * 2;
    }

    // The operand whose sums are over columns 16 step to 16 step + 15, from a row on, a multiple of 8.
    __device__ uint64_t along_columns(int step, int row = 0) const {
        return descriptor(step / 4 * BLOCK_BYTES + row * 128 + step % 4 * 32, 16);
    }

    // The operand whose sums are over rows 16 step to 16 step + 15, from a column on, a multiple of 64.
    __device__ uint64_t along_rows(int step, int column = 0) const {
        return descriptor(column / 64 * BLOCK_BYTES + step * 2 * ATOM, BLOCK_BYTES);
    }

    // The operand A of `along_columns` in registers, for a warpgroup: from the tile or to it, 64 rows from a row on, a
    // multiple of 16. The four matrices of an instruction are a warp's 16 rows of two chunks.
    __device__ void read_operand(uint32_t (&a)[4], int step, int row) const { load_matrices(a, matrix_row(step, row)); }
    __device__ void write_operand(const uint32_t (&a)[4], int step, int row) const {
        store_matrices(matrix_row(step, row), a);
    }
    // Where the row of a matrix is that this lane names.
    __device__ uint32_t matrix_row(int step, int row) const {
        const int lane = threadIdx.x % 32;
        const uint32_t first = at(row + threadIdx.x / 32 % 4 * 16 + lane % 16, step / 4 * 64 + lane / 16 * 8);
        return first ^ step % 4 * 32;  // as swizzled: 16 columns further within the block
    }

    // Most of it is the same for the whole tile; so a part costs one 32-bit addition.
    __device__ uint64_t descriptor(uint32_t offset, int leading) const {
        constexpr uint64_t SWIZZLE_128 = 1ull << 62, STRIDE = static_cast<uint64_t>(ATOM / 16) << 32;
        const uint32_t of_tile = (address & 0x3ffff) / 16 | static_cast<uint32_t>(leading / 16) << 16;
        return SWIZZLE_128 | STRIDE | of_tile + offset / 16;
    }
};
