// Registers the CUDA kernels of the norm that DSX_NORM names; the schemas are in
// deepspeed_ext/ops/transformer/norms.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/norm_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const Norm& norm, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    norm_cuda<DSX_NORM>(norm, current_cuda_stream(device));
  }

  static void run_backward(const NormBackward& norm, const OfVectors<Rows>& grads, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t floats = norm_backward_workspace<DSX_NORM>(norm, grads);
    const torch::stable::Tensor workspace = cuda_workspace(floats * int64_t(sizeof(float)), device);
    norm_backward_cuda<DSX_NORM>(norm, grads, static_cast<float*>(workspace.data_ptr()),
                                 current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) { register_norm<DSX_NORM, Cuda>(library); }

}  // namespace dsx
