// The torch side of decode_attention that both devices share. `Device` is what
// decode_attention_ops.cpp and decode_attention_ops_cuda.cpp have one of each:
// run(DecodeAttention, device) works it out, or queues that.
#pragma once

#include "transformer/attention_ops.h"

namespace dsx {

using torch::stable::Tensor;

constexpr int64_t kMostNewTokens = 16;

template <class Device>
std::tuple<Tensor, Tensor> decode_attention(
    const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& table,
    const Tensor& lengths, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
    const OptionalTensor& slots, const OptionalTensor& counts, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, double scale, int64_t window, double softcap) {
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  const AttentionOptions options{alibi_slopes, sinks, scale, window, softcap};
  return attend("decode_attention", kMostNewTokens, q, tensors, options, &Device::run);
}

}  // namespace dsx
