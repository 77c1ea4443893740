// Registers the CUDA kernels of gated_activation; the schemas are in
// deepspeed_ext/ops/transformer/gated_activation.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/gated_activation_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const GatedActivation& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    gated_activation_cuda(call, current_cuda_stream(device));
  }
  static void run(const GatedActivationBackward& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    gated_activation_backward_cuda(call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("gated_activation", &boxed<&gated_activation<Cuda>>);
  library.impl("gated_activation.packed", &boxed<&gated_activation_packed<Cuda>>);
  library.impl("gated_activation_backward", &boxed<&gated_activation_backward<Cuda>>);
  library.impl("gated_activation_backward.packed", &boxed<&gated_activation_packed_backward<Cuda>>);
}

}  // namespace dsx
