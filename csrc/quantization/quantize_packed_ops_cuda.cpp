// Registers the CUDA kernel of quantize_packed_; the schema is in deepspeed_ext/ops/quantization/.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "quantization/quantize_packed_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const QuantizePacked& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    quantize_packed_cuda(call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("quantize_packed_", &boxed<&quantize_packed_<Cuda>>);
}

}  // namespace dsx
