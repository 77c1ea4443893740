// The torch side of append_and_attend_ that both devices share. `Device` is what
// append_and_attend_ops.cpp and append_and_attend_ops_cuda.cpp have one of each:
// run(RopeAppend, DecodeAttention, device) works both out, or queues that; append(RopeAppend,
// device) the first.
#pragma once

#include "transformer/decode_attention_ops.h"
#include "transformer/rope_append_ops.h"

namespace dsx {

using torch::stable::Tensor;

// Of the queries that turn_apart has memory for.
inline int64_t turned_bytes(const DecodeAttention& attention) {
  return attention.news.batches * attention.q.heads * attention.kv.width *
         bytes_of(attention.q.dtype);
}
// The first op writes queries there, and the second one reads them there.
inline void turn_apart(RopeAppend& append, DecodeAttention& attention, void* memory) {
  const int64_t heads = attention.q.heads, width = attention.kv.width;
  attention.q = {memory, heads, heads * width, heads * width, width, attention.q.dtype};
  append.q_out = attention.q;
}

template <class Device>
std::tuple<Tensor, Tensor> append_and_attend(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
    const Tensor& violations, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
    const Tensor& table, const Tensor& lengths, const OptionalTensor& slots,
    const OptionalTensor& counts, const OptionalTensor& frequencies, const OptionalTensor& q_weight,
    const OptionalTensor& k_weight, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    bool interleaved, double rotation_scale, double eps, double weight_offset, double scale,
    int64_t window, double softcap) {
  constexpr const char* op = "append_and_attend_";
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  const RopeAppendOptions options{frequencies,      q_weight,       k_weight, interleaved,
                                  "rotation_scale", rotation_scale, eps,      weight_offset};
  const auto reader = read_append(op, q, k, v, violations, tensors, options, false);
  const TensorView view(q.get());
  check(view.sizes[1] == 1, op, ": q has ", view.sizes[1], " tokens for each slot, expected 1");
  auto results = attend(op, 1, q, tensors, {alibi_slopes, sinks, scale, window, softcap},
                        [&](const DecodeAttention& attention, int device) {
    Device::run(reader.call, attention, device);
  });
  const bool without_queries = view.sizes[0] > 0 && view.numel == 0;
  if (without_queries) Device::append(reader.call, view.device_index);
  return results;
}

}  // namespace dsx
