// Launches a kernel. Python gets its error as a sentence, or null if there is none.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

template <typename... Parameters, typename... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, void* stream,
                   Arguments... arguments) {
    if (blocks > INT_MAX) return "the problem has more tiles than a grid has blocks, 2147483647";
    // Beyond 48 KB a kernel has to ask for shared memory, on each device.
    const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t refused = cudaFuncSetAttribute(kernel, attribute, shared_bytes);
    if (refused != cudaSuccess) cudaGetLastError();  // clears it, because it is reported here
    if (refused == cudaErrorInvalidValue) return "it needs more shared memory a block than this GPU has";
    if (refused != cudaSuccess) return cudaGetErrorString(refused);
    kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Fill memory of the GPU with zeros, in the stream's order.
inline const char* clear(void* data, size_t bytes, void* stream) {
    const cudaError_t error = cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(stream));
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
