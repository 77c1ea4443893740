// Registers the CUDA kernels of rms_norm; the schemas are in
// deepspeed_ext/ops/transformer/rms_norm.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/rms_norm_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const RmsNorm& norm, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    rms_norm_cuda(norm, current_cuda_stream(device));
  }

  static void run_backward(const RmsNormBackward& norm, Rows grad_weight, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t floats = grad_weight.data == nullptr ? 0 : rms_norm_backward_workspace(norm);
    const torch::stable::Tensor workspace = cuda_workspace(floats * int64_t(sizeof(float)), device);
    rms_norm_backward_cuda(norm, grad_weight, static_cast<float*>(workspace.data_ptr()),
                           current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("rms_norm", &boxed<&rms_norm<Cuda>>);
  library.impl("rms_norm.residual", &boxed<&rms_norm_residual<Cuda>>);
  library.impl("rms_norm_backward", &boxed<&rms_norm_backward<Cuda>>);
}

}  // namespace dsx
