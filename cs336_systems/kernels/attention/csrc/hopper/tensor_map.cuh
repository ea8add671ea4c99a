// Tensor maps: how the host describes a tensor to TMA.
//
// A map is 128 bytes, which only the driver knows how to fill: data pointer, element type, sizes, strides, the box that
// one copy moves, and the swizzle of the box in shared memory. The kernel gets it as a parameter marked
// __grid_constant__, so that it stays in constant memory and TMA can read it there.
//
// Our tensors are (B, H, N, D). TMA counts dimensions from the fastest: D, N, H, B. It needs
//   - adjacent elements in D, and all other strides multiples of 16 bytes and below 2^40;
//   - data that start at a multiple of 16 bytes;
//   - a box of at most 256 elements a dimension, whose rows are at most 128 bytes long, as long as the swizzle's rows.
// Our box has 64 columns of 16-bit numbers, 128 bytes. Where it reaches beyond D, TMA fills the rest with zeros. Python
// copies tensors that do not satisfy the first two conditions (`_movable` in flash_cuda_hopper.py).
//
// The driver's function is found through the CUDA runtime at run time, so that the library links without libcuda.
#pragma once

#include "../problem.cuh"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

using TensorMap = CUtensorMap;

constexpr int BOX_COLUMNS = 64;

// The map of x, with `rows` rows in a box. Returns null or an error message.
template <typename T>
const char* make_tensor_map(TensorMap& map, const View& x, int64_t batch, int64_t heads, int64_t n, int64_t head_size,
                            int rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
    if (encode == nullptr) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result;
        const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                                            &result);
        if (error != cudaSuccess) return cudaGetErrorString(error);
        if (result != cudaDriverEntryPointSuccess) return "the driver has no tensor maps, which came with CUDA 12";
        encode = reinterpret_cast<decltype(encode)>(found);
    }
    // The driver needs a context. A thread of autograd has none before its first call that makes one current.
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaSetDevice(device) != cudaSuccess) return "there is no CUDA context";
    // The stride of a dimension of one element is never used, and may be anything; TMA accepts 16 bytes.
    const auto bytes = [](int64_t size, int64_t stride) -> cuuint64_t { return size == 1 ? 16 : 2 * stride; };
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_size), static_cast<cuuint64_t>(n),
                                static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
    const cuuint64_t strides[] = {bytes(n, x.row_stride), bytes(heads, x.head_stride), bytes(batch, x.batch_stride)};
    const cuuint32_t box[] = {BOX_COLUMNS, static_cast<cuuint32_t>(rows), 1, 1}, steps[] = {1, 1, 1, 1};
    const auto type = std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult result = encode(&map, type, 4, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? nullptr : "the driver refuses a tensor map: a stride, a size or an address";
}
