// Registers the CUDA kernel of squared_norms; the schema is in deepspeed_ext/ops/l2_norm.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "optimizers/l2_norm_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const std::vector<NormTensor>& tensors, double* squared_norms, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t count = int64_t(tensors.size());
    const int64_t doubles = squared_norms_workspace(tensors.data(), count);
    const torch::stable::Tensor workspace =
        cuda_workspace(doubles * int64_t(sizeof(double)), device);
    squared_norms_cuda(tensors.data(), count, static_cast<double*>(workspace.data_ptr()),
                       squared_norms, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("squared_norms", &boxed<&squared_norms<Cuda>>);
}

}  // namespace dsx
