// Registers the CUDA kernel of fingerprints; the schema is in
// deepspeed_ext/ops/optimizers/fingerprint.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "optimizers/fingerprint_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const std::vector<Bytes>& tensors, uint64_t* fingerprints, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    fingerprints_cuda(tensors.data(), int64_t(tensors.size()), fingerprints,
                      current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("fingerprints", &boxed<&fingerprints<Cuda>>);
}

}  // namespace dsx
