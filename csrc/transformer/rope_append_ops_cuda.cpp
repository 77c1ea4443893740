// Registers the CUDA kernel of rope_append_; the schemas are in
// deepspeed_ext/ops/transformer/rope_append.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/rope_append_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const RopeAppend& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    rope_append_cuda(call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl(DSX_KV::kAppend, &boxed<&rope_append<Cuda>>);
}

}  // namespace dsx
