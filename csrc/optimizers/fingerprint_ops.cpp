// The torch side of fingerprints, for the device that this is compiled for. The schema is in
// deepspeed_ext/ops/optimizers/fingerprint.py.
#include "optimizers/chunks.h"
#include "common/torch/arguments.h"
#include "common/torch/device.h"
#include "optimizers/dense_elements_ops.h"
#include "optimizers/fingerprint.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

#ifdef USE_CUDA
void run(const std::vector<Bytes>& tensors, uint64_t* fingerprints, int device) {
  const OnDevice on(device);
  fingerprints_cuda(tensors.data(), int64_t(tensors.size()), fingerprints, on.stream);
}
#else
constexpr int64_t kBytesPerThread = 16 * kBlockBytes;  // 10 us: less is not worth a thread

void run(const std::vector<Bytes>& tensors, uint64_t* fingerprints, int /*device*/) {
  const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
  const std::vector<int64_t> tensor_begin =
      begins_of(tensors.size(), [&](size_t i) { return tensors[i].bytes; });
  std::fill_n(fingerprints, tensors.size(), 0);
  torch::stable::parallel_for(0, tensor_begin.back(), kBytesPerThread,
                              [&](int64_t begin, int64_t end) {
    add_fingerprints_cpu(isa, tensors.data(), tensor_begin.data(), int64_t(tensors.size()), begin,
                         end, fingerprints);
  });
}
#endif

// The op itself. run(tensors, fingerprints, device_index) works them out or queues that;
// fingerprint_ops.cpp and fingerprint_ops_cuda.cpp have one each.
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
  run(bytes, static_cast<uint64_t*>(made.data_ptr()), first.device_index);
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl("fingerprints", &boxed<&fingerprints>);
}

}  // namespace dsx
