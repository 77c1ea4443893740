// The torch side of squared_norms that both devices share: checks, then tensors into NormTensor.
#pragma once

#include "common/torch/arguments.h"
#include "common/torch/checks.h"
#include "optimizers/l2_norm.h"

namespace dsx {

// The elements of a tensor as they lie in memory, in any order. If they do not fill their memory
// once (expanded gradients, slices), those of a contiguous copy, which `copies` keeps.
inline const void* dense_elements(const TensorView& view, TensorList& copies) {
  if (view.is_dense()) return view.data;
  std::vector<int64_t> strides(size_t(view.dim), 1);
  for (int64_t i = view.dim - 2; i >= 0; --i) strides[i] = strides[i + 1] * view.sizes[i + 1];
  AtenTensorHandle copy = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(view.dim, view.sizes, strides.data(), view.dtype,
                                                  view.device_type, view.device_index, &copy));
  copies.push_back(copy);
  TORCH_ERROR_CODE_CHECK(aoti_torch_tensor_copy_(view.handle, copy));
  return address_of(copy);
}

// The op itself. Device::run(tensors, squared_norms, device_index) works them out or queues that;
// l2_norm_ops.cpp and l2_norm_ops_cuda.cpp have one each.
template <class Device>
torch::stable::Tensor squared_norms(const TensorList& tensors) {
  constexpr const char* op = "squared_norms";
  const int64_t count = int64_t(tensors.size());
  const std::vector<char*> addresses = tensors.addresses();
  const TensorView first(tensors[0], addresses[0]);
  std::vector<NormTensor> norm_tensors(tensors.size());
  TensorList copies;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView view(tensors[i], addresses[i]);
    const Item item{"tensors", i};
    check_device(op, item, view, first);
    const Dtype dtype = storage_dtype(op, item, view);
    check_memory(op, item, view);
    norm_tensors[i] = {dense_elements(view, copies), view.numel, dtype};
  }
  const int64_t stride = 1;
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &count, &stride, aoti_torch_dtype_float64(),
                                                  first.device_type, first.device_index, &result));
  torch::stable::Tensor squares(result);
  Device::run(norm_tensors, static_cast<double*>(squares.data_ptr()), first.device_index);
  return squares;
}

}  // namespace dsx
