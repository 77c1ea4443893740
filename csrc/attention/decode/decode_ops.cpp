// The torch side of decode_attention, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/attention/decode_attention.py.
#include "attention/decode/attention_ops.h"
#include "attention/decode/decode_run_ops.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr int64_t kMostNewTokens = 16;

std::tuple<Tensor, Tensor> decode_attention(
    const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& table,
    const Tensor& lengths, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
    const OptionalTensor& slots, const OptionalTensor& counts, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, double scale, int64_t window, double softcap) {
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  const AttentionOptions options{alibi_slopes, sinks, scale, window, softcap};
  return attend("decode_attention", kMostNewTokens, q, tensors, options,
                [](const DecodeAttention& call, int device) { run(call, device); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl(DSX_KV::kDecode, &boxed<&decode_attention>);
}

}  // namespace dsx
