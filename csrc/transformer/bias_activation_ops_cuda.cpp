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

  static void run_backward(BiasActivationBackward call, Rows grad_bias, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = current_cuda_stream(device);
    const int64_t groups = bias_activation_groups_cuda(call.rows);
    call.sums = grad_bias;
    if (grad_bias.data == nullptr || groups == 1)
      return bias_activation_backward_cuda(call, stream);
    const torch::stable::Tensor workspace =
        cuda_workspace(groups * call.length * int64_t(sizeof(float)), device);
    float* partials = static_cast<float*>(workspace.data_ptr());
    call.sums = {partials, call.length, Dtype::float32};
    bias_activation_backward_cuda(call, stream);
    add_bias_partials_cuda(partials, groups, call.length, grad_bias, stream);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("bias_activation", &boxed<&bias_activation<Cuda>>);
  library.impl("bias_activation_backward", &boxed<&bias_activation_backward<Cuda>>);
}

}  // namespace dsx
