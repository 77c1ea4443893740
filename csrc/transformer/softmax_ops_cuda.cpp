// Registers the CUDA kernels of softmax; the schemas are in
// deepspeed_ext/ops/transformer/softmax.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/softmax_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const Softmax& softmax, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    softmax_cuda(softmax, current_cuda_stream(device));
  }

  static void run_backward(const SoftmaxBackward& softmax, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    softmax_backward_cuda(softmax, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("softmax", &boxed<&softmax<Cuda>>);
  library.impl("softmax_backward", &boxed<&softmax_backward<Cuda>>);
}

}  // namespace dsx
