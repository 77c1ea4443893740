// Registers the CUDA kernels of bias_activation; the schemas are in
// deepspeed_ext/ops/transformer/bias_activation.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/bias_activation_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const BiasActivation& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    bias_activation_cuda(call, current_cuda_stream(device));
  }

  static void run_backward(const BiasActivationBackward& call, Rows grad_bias, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const bool wanted = grad_bias.data != nullptr;
    const int64_t floats = wanted ? bias_activation_backward_workspace(call) : 0;
    const torch::stable::Tensor workspace = cuda_workspace(floats * int64_t(sizeof(float)), device);
    bias_activation_backward_cuda(call, grad_bias, static_cast<float*>(workspace.data_ptr()),
                                  current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("bias_activation", &boxed<&bias_activation<Cuda>>);
  library.impl("bias_activation_backward", &boxed<&bias_activation_backward<Cuda>>);
}

}  // namespace dsx
