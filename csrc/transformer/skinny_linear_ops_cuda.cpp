// Registers the CUDA kernel of skinny_linear; the schema is in
// deepspeed_ext/ops/transformer/skinny_linear.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/few_rows_cuda.h"
#include "transformer/skinny_linear_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const SkinnyLinear& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    skinny_linear_cuda(WithInverses(call, device).call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) { register_skinny_linear<Cuda>(library); }

}  // namespace dsx
