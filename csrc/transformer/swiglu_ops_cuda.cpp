// Registers the CUDA kernels of swiglu; the schemas are in deepspeed_ext/ops/transformer/swiglu.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/swiglu_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const Swiglu& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    swiglu_cuda(call, current_cuda_stream(device));
  }
  static void run(const SwigluBackward& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    swiglu_backward_cuda(call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("swiglu", &boxed<&swiglu<Cuda>>);
  library.impl("swiglu.packed", &boxed<&swiglu_packed<Cuda>>);
  library.impl("swiglu_backward", &boxed<&swiglu_backward<Cuda>>);
  library.impl("swiglu_backward.packed", &boxed<&swiglu_packed_backward<Cuda>>);
}

}  // namespace dsx
