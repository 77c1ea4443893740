// Registers the CUDA kernel of decode_attention; the schemas are in
// deepspeed_ext/ops/transformer/decode_attention.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/decode_attention_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void run(const DecodeAttention& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    const Tensor workspace = cuda_workspace(decode_workspace_bytes(call), device);
    decode_attention_cuda(call, workspace.data_ptr(), current_cuda_stream(device));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl(DSX_KV::kDecode, &boxed<&decode_attention<Cuda>>);
}

}  // namespace dsx
