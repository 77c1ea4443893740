// The torch side of prefill_attention that both devices share. `Device` is what
// prefill_attention_ops.cpp and prefill_attention_ops_cuda.cpp have one of each:
// run(PrefillAttention, device) works it out, or queues that.
#pragma once

#include "transformer/attention_ops.h"
#include "transformer/prefill_attention.h"

namespace dsx {

using torch::stable::Tensor;

constexpr int64_t kMostChunkTokens = 1 << 24;

template <class Device>
std::tuple<Tensor, Tensor> prefill_attention(
    const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& table,
    const Tensor& lengths, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
    const OptionalTensor& slots, const OptionalTensor& counts, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, double scale, int64_t window, double softcap) {
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  const AttentionOptions options{alibi_slopes, sinks, scale, window, softcap};
  return attend("prefill_attention", kMostChunkTokens, q, tensors, options, &Device::run);
}

}  // namespace dsx
