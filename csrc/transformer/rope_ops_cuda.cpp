// Registers the CUDA kernels of rope; the schemas are in deepspeed_ext/ops/transformer/rope.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/rope_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const Rope& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    rope_cuda(call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("rope", &boxed<&rope<Cuda>>);
  library.impl("rope.pair", &boxed<&rope_pair<Cuda>>);
  library.impl("rope_", &boxed<&rope_in_place<Cuda>>);
}

}  // namespace dsx
