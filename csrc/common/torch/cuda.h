// What a CUDA op gets from torch: the current stream, and memory of the caching allocator.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>

#include "common/torch/new_tensor.h"

namespace dsx {

inline void* current_cuda_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

// Makes a device the current one for as long as it lives, and knows its stream.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  void* stream;

  explicit OnDevice(int32_t device) : guard(device), stream(current_cuda_stream(device)) {}
};

// Uninitialised memory. It may be let go of as soon as the work that uses it is queued: the
// allocator hands it out again in the order of the stream, also in a CUDA graph.
inline torch::stable::Tensor cuda_workspace(int64_t bytes, int32_t device) {
  const int64_t stride = 1;
  return new_strided_tensor(&bytes, &stride, 1, aoti_torch_dtype_uint8(),
                            aoti_torch_device_type_cuda(), device);
}

}  // namespace dsx
