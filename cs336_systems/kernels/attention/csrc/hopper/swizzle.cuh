// Tiles of 16-bit numbers in shared memory, in the layout that TMA writes and matrix products read.
//
// A tile of ROWS x COLUMNS consists of blocks of 64 columns, one after the other in memory. A row of a block is 128
// bytes, or eight chunks of 16. Eight rows are an atom, 1,024 bytes. If rows were stored plainly, a column of chunks
// would lie in the same four of the 32 banks. So TMA puts chunk c of row r at place c ^ (r % 8):
//
//     row 0    0 1 2 3 4 5 6 7        The hardware does not know rows. It changes addresses: bits 4-6 (the chunk)
//     row 1    1 0 3 2 5 4 7 6        become their exclusive or with bits 7-9 (the row). So an atom has to start at a
//     row 2    2 3 0 1 6 7 4 5        multiple of 1,024 bytes. Descriptors hold addresses before this change. Ordinary
//     ...                             loads and stores make the change themselves: `at` returns the changed address.
//     row 7    7 6 5 4 3 2 1 0
//
// A matrix product finds an operand in shared memory by its descriptor, a number of 64 bits:
//
//     bits  0-13   address / 16
//     bits 16-29   "leading" byte offset / 16
//     bits 32-45   "stride" byte offset / 16
//     bits 62-63   swizzle: 1 is 128 bytes
//
// A product of A (M x K) and B (K x N) adds over K, 16 at a time. An operand can lie in its tile in two ways:
//
//   - The sum is over the tile's columns (`over_columns`; CUTLASS: K-major): q and k in the scores q k^T, where K is
//     the head size. "Stride" is the distance of the next 8 rows, an atom; "leading" is not used. 16 columns are 32
//     bytes, so step s of a block begins 32 s bytes further, in the middle of an atom. This is right because the
//     hardware changes the bits of the whole address.
//   - The sum is over the tile's rows (`over_rows`; CUTLASS: MN-major): v in the output p v, where K counts keys. The
//     product is told that the operand is transposed. "Stride" is the distance of the next 8 rows, an atom; "leading"
//     is the distance of the next 64 columns, a block. 16 rows are two atoms.
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

    // The descriptor for a sum over the columns 16 step to 16 step + 15. Rows count from `row`, a multiple of 8.
    __device__ uint64_t over_columns(int step, int row = 0) const {
        return descriptor(step / 4 * BLOCK_BYTES + row * 128 + step % 4 * 32, 16);
    }

    // The descriptor for a sum over the rows 16 step to 16 step + 15. Columns count from `column`, a multiple of 64.
    __device__ uint64_t over_rows(int step, int column = 0) const {
        return descriptor(column / 64 * BLOCK_BYTES + step * 2 * ATOM, BLOCK_BYTES);
    }

    // Move the operand A of `over_columns` from the tile to a warpgroup's registers, or back: 64 rows from `row` on, a
    // multiple of 16. Each warp moves four 8 x 8 matrices in one instruction: its 16 rows of two chunks.
    __device__ void read_operand(uint32_t (&a)[4], int step, int row) const { load_matrices(a, matrix_row(step, row)); }
    __device__ void write_operand(const uint32_t (&a)[4], int step, int row) const {
        store_matrices(matrix_row(step, row), a);
    }
    // The address that this lane passes to the instruction: a matrix's row (instructions.cuh).
    __device__ uint32_t matrix_row(int step, int row) const {
        const int lane = threadIdx.x % 32;
        const uint32_t first = at(row + threadIdx.x / 32 % 4 * 16 + lane % 16, step / 4 * 64 + lane / 16 * 8);
        return first ^ step % 4 * 32;  // as swizzled: 16 columns further within the block
    }

    // Only the offset differs between the steps of a tile, so each costs one 32-bit addition.
    __device__ uint64_t descriptor(uint32_t offset, int leading) const {
        constexpr uint64_t SWIZZLE_128 = 1ull << 62, STRIDE = static_cast<uint64_t>(ATOM / 16) << 32;
        const uint32_t of_tile = (address & 0x3ffff) / 16 | static_cast<uint32_t>(leading / 16) << 16;
        return SWIZZLE_128 | STRIDE | of_tile + offset / 16;
    }
};
