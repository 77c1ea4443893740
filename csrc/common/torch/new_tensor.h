// Tensors that an op makes: results, and copies of arguments that lie in memory in an unusual way.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "common/torch/checks.h"

namespace dsx {

// Uninitialised.
inline torch::stable::Tensor new_strided_tensor(const int64_t* sizes, const int64_t* strides,
                                                int64_t dim, int32_t dtype, int32_t device_type,
                                                int32_t device_index) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type, device_index, &handle));
  return torch::stable::Tensor(handle);
}

// The same, contiguous, on the device of `beside`.
inline torch::stable::Tensor new_tensor(const int64_t* sizes, int64_t dim, int32_t dtype,
                                        const TensorView& beside) {
  std::vector<int64_t> strides(size_t(dim), 1);
  for (int64_t i = dim - 2; i >= 0; --i) {
    strides[size_t(i)] = strides[size_t(i + 1)] * (sizes[i + 1] > 1 ? sizes[i + 1] : 1);
  }
  return new_strided_tensor(sizes, strides.data(), dim, dtype, beside.device_type,
                            beside.device_index);
}

// With the sizes of `view`.
inline torch::stable::Tensor new_tensor(const TensorView& view, Dtype dtype) {
  return new_tensor(view.sizes, view.dim, torch_code(dtype), view);
}

inline torch::stable::Tensor contiguous_copy(const TensorView& view) {
  torch::stable::Tensor copy = new_tensor(view.sizes, view.dim, view.dtype, view);
  TORCH_ERROR_CODE_CHECK(aoti_torch_tensor_copy_(view.handle, copy.get()));
  return copy;
}

}  // namespace dsx
