// Registers the CUDA kernel of prefill_attention; the schemas are in
// deepspeed_ext/ops/transformer/prefill_attention.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/prefill_attention_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const PrefillAttention& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    prefill_attention_cuda(call, current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl(DSX_KV::kPrefill, &boxed<&prefill_attention<Cuda>>);
}

}  // namespace dsx
