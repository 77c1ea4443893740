// What a CUDA op gets from torch: the current stream, and memory of the caching allocator.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace dsx {

inline void* current_cuda_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

// Uninitialised memory. It may be let go of as soon as the work that uses it is queued: the
// allocator hands it out again in the order of the stream, also in a CUDA graph.
inline torch::stable::Tensor cuda_workspace(int64_t bytes, int32_t device) {
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return torch::stable::Tensor(handle);
}

}  // namespace dsx
