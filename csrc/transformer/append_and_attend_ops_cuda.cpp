// Registers the CUDA kernel of append_and_attend_; the schemas are in
// deepspeed_ext/ops/transformer/append_and_attend.py.
#include <torch/csrc/stable/accelerator.h>

#include "common/torch/cuda.h"
#include "transformer/append_and_attend_ops.h"

namespace dsx {
namespace {

struct Cuda {
  static void append(const RopeAppend& call, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    rope_append_cuda(call, current_cuda_stream(device));
  }
  static void run(RopeAppend call, DecodeAttention attention, int device) {
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* const stream = current_cuda_stream(device);
    if (decode_in_clusters_cuda(attention, &call, stream)) return;
    const Tensor turned = cuda_workspace(turned_bytes(attention), device);
    turn_apart(call, attention, turned.data_ptr());
    rope_append_cuda(call, stream);
    const Tensor workspace = cuda_workspace(decode_workspace_bytes(attention), device);
    decode_attention_cuda(attention, workspace.data_ptr(), stream);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl(DSX_KV::kAppendAndAttend, &boxed<&append_and_attend<Cuda>>);
}

}  // namespace dsx
