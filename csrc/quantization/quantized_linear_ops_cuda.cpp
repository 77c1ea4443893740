// Registers the CUDA kernels of quantized_linear and unpack_weight for codes of DSX_BITS; the
// schemas are in deepspeed_ext/ops/quantization/.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/few_rows_cuda.h"
#include "quantization/quantized_linear_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const QuantizedLinear& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int64_t bytes = quantized_workspace_bytes(call);
    std::optional<Tensor> workspace;
    if (bytes > 0) workspace = cuda_workspace(bytes, device);
    quantized_linear_cuda(WithInverses(call, device).call,
                          workspace ? workspace->data_ptr() : nullptr, current_cuda_stream(device));
  }

  static void unpack(const PackedWeight& weight, const Rows& out, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    unpack_weight_cuda(weight, out, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  register_quantized_linear<Cuda>(library);
}

}  // namespace dsx
