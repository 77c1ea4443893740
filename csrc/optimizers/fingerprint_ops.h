// The torch side of fingerprints that both devices share: checks, then tensors into Bytes.
#pragma once

#include "common/torch/arguments.h"
#include "optimizers/dense_elements_ops.h"
#include "optimizers/fingerprint.h"

namespace dsx {

// The op itself. Device::run(tensors, fingerprints, device_index) works them out or queues that;
// fingerprint_ops.cpp and fingerprint_ops_cuda.cpp have one each.
template <class Device>
torch::stable::Tensor fingerprints(const TensorList& tensors) {
  constexpr const char* op = "fingerprints";
  const int64_t count = int64_t(tensors.size());
  const std::vector<char*> addresses = tensors.addresses();
  const TensorView first(tensors[0], addresses[0]);
  std::vector<Bytes> bytes(tensors.size());
  std::vector<torch::stable::Tensor> copies;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const TensorView view(tensors[i], addresses[i]);
    const Item item{"tensors", i};
    check_device(op, item, view, first);
    const int64_t element_bytes = int64_t(aoti_torch_dtype_element_size(view.dtype));
    check(element_bytes <= 8, op, ": ", item, " is ", DtypeCode{view.dtype},
          ", expected at most 8 bytes an element");
    check_memory(op, item, view);
    bytes[i] = {dense_elements(view, copies), view.numel * element_bytes};
  }
  torch::stable::Tensor made = new_tensor(&count, 1, aoti_torch_dtype_int64(), first);
  Device::run(bytes, static_cast<uint64_t*>(made.data_ptr()), first.device_index);
  return made;
}

}  // namespace dsx
