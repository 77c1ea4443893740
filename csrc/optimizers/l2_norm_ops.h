// The torch side of squared_norms that both devices share: checks, then tensors into NormTensor.
#pragma once

#include "common/torch/arguments.h"
#include "optimizers/dense_elements_ops.h"
#include "optimizers/l2_norm.h"

namespace dsx {

// The op itself. Device::run(tensors, squared_norms, device_index) works them out or queues that;
// l2_norm_ops.cpp and l2_norm_ops_cuda.cpp have one each.
template <class Device>
torch::stable::Tensor squared_norms(const TensorList& tensors) {
  constexpr const char* op = "squared_norms";
  const int64_t count = int64_t(tensors.size());
  const std::vector<char*> addresses = tensors.addresses();
  const TensorView first(tensors[0], addresses[0]);
  std::vector<NormTensor> norm_tensors(tensors.size());
  std::vector<torch::stable::Tensor> copies;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView view(tensors[i], addresses[i]);
    const Item item{"tensors", i};
    check_device(op, item, view, first);
    const Dtype dtype = storage_dtype(op, item, view);
    check_memory(op, item, view);
    norm_tensors[i] = {dense_elements(view, copies), view.numel, dtype};
  }
  torch::stable::Tensor squares = new_tensor(&count, 1, aoti_torch_dtype_float64(), first);
  Device::run(norm_tensors, static_cast<double*>(squares.data_ptr()), first.device_index);
  return squares;
}

}  // namespace dsx
