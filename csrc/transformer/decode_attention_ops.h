// The torch side of decode_attention that both devices share: checks, then tensors into the struct.
// `Device` is what decode_attention_ops.cpp and decode_attention_ops_cuda.cpp have one of each:
// run(DecodeAttention, device) works it out, or queues that.
#pragma once

#include <cmath>
#include <limits>

#include "transformer/decode_attention.h"
#include "transformer/paged_kv_ops.h"

namespace dsx {

using torch::stable::Tensor;

constexpr int64_t kMostNewTokens = 16;

// One float for each head of q, or none.
inline const float* floats_of_heads(const char* op, const Item& item, const OptionalTensor& tensor,
                                    const TensorView& q) {
  if (!tensor.has_value()) return nullptr;
  const TensorView view(tensor->get());
  check_device(op, item, view, q);
  check_dtype(op, item, view, Dtype::float32);
  check_flat(op, item, view);
  check(view.numel == q.sizes[2], op, ": ", item, " has shape ", Integers{view.sizes, view.dim},
        ", expected [", q.sizes[2], "], the heads of q");
  check_memory(op, item, view);
  return reinterpret_cast<const float*>(view.data);
}

inline void check_queries(const char* op, const TensorView& q, const PagedKv& kv) {
  check(q.dim == 4, op, ": q has shape ", Integers{q.sizes, q.dim},
        ", expected [batch, tokens, heads, head_dim]");
  check(q.sizes[1] >= 1 && q.sizes[1] <= kMostNewTokens, op, ": q has ", q.sizes[1],
        " tokens for each slot, expected 1 to ", kMostNewTokens);
  check(q.sizes[3] == kv.width, op, ": q has head_dim ", q.sizes[3], ", expected ", kv.width,
        ", that of keys");
  check(kv.width >= 1 && kv.width <= kLargestWidth, op, ": keys has head_dim ", kv.width,
        ", expected 1 to ", kLargestWidth);
  check(kv.heads > 0 && q.sizes[2] % kv.heads == 0, op, ": q has ", q.sizes[2],
        " heads, expected a multiple of ", kv.heads, ", the heads of keys");
}

template <class Device>
std::tuple<Tensor, Tensor> decode_attention(
    const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& table,
    const Tensor& lengths, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
    const OptionalTensor& slots, const OptionalTensor& counts, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, double scale, int64_t window, double softcap) {
  constexpr const char* op = "decode_attention";
  TensorView view(q.get());
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  PagedKvReader reader(op, tensors, view);
  check_queries(op, view, reader.kv);
  DecodeAttention call = {};
  call.kv = reader.kv;
  call.news = reader.read_new(tensors, view);
  check_memory(op, {"q"}, view);
  std::optional<Tensor> copy;
  if (view.sizes[3] > 1 && view.strides[3] != 1) {
    copy.emplace(contiguous_copy(view));
    view = TensorView(copy->get());
  }
  call.q = {view.data,       view.sizes[2],   view.strides[0],
            view.strides[1], view.strides[2], storage_dtype(op, {"q"}, view)};
  call.group = view.sizes[2] / call.kv.heads;
  check(std::abs(scale) <= std::numeric_limits<float>::max(), op, ": scale is ", scale,
        ", expected a finite number");
  check(softcap >= 0 && softcap <= std::numeric_limits<float>::max(), op, ": softcap is ", softcap,
        ", expected a finite number that is 0 or more");
  check(window >= 0, op, ": window is ", window, ", expected 0 or more");
  call.scale = float(scale);
  call.soft_cap = float(softcap);
  call.window = window;
  call.alibi_slopes = floats_of_heads(op, {"alibi_slopes"}, alibi_slopes, view);
  call.sinks = floats_of_heads(op, {"sinks"}, sinks, view);
  Tensor out = new_tensor(view, call.q.dtype);
  Tensor lse = new_tensor(view.sizes, 3, torch_code(Dtype::float32), view);
  call.out = out.data_ptr();
  call.lse = static_cast<float*>(lse.data_ptr());
  if (view.numel > 0) Device::run(call, view.device_index);
  return {std::move(out), std::move(lse)};
}

}  // namespace dsx
