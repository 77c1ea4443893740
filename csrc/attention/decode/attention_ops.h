// The torch side of attention over a cache: every check, then tensors into the struct.
#pragma once

#include <tuple>

#include "attention/decode/decode.h"
#include "attention/cache/paged_kv_ops.h"
#include "common/torch/soft_cap.h"

namespace dsx {

// What an op of attention is called with beside q and the cache.
struct AttentionOptions {
  const OptionalTensor &alibi_slopes, &sinks;
  double scale;
  int64_t window;
  double softcap;
};

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

inline void check_heads(const char* op, const TensorView& q, const PagedKv& kv) {
  check(q.sizes[3] == kv.width, op, ": q has head_dim ", q.sizes[3], ", expected ", kv.width,
        ", that of keys");
  check(kv.width >= 1 && kv.width <= kLargestWidth, op, ": keys has head_dim ", kv.width,
        ", expected 1 to ", kLargestWidth);
  check(kv.heads > 0 && q.sizes[2] % kv.heads == 0, op, ": q has ", q.sizes[2],
        " heads, expected a multiple of ", kv.heads, ", the heads of keys");
}

// One call: checks everything, makes the results, and calls run(DecodeAttention, device).
template <class Run>
std::tuple<torch::stable::Tensor, torch::stable::Tensor> attend(const char* op, int64_t most_tokens,
                                                                const torch::stable::Tensor& q,
                                                                const PagedKvTensors& tensors,
                                                                const AttentionOptions& options,
                                                                const Run& run) {
  using torch::stable::Tensor;
  TensorView view(q.get());
  PagedKvReader reader(op, tensors, view);
  check(view.dim == 4, op, ": q has shape ", Integers{view.sizes, view.dim},
        ", expected [batch, tokens, heads, head_dim]");
  check(view.sizes[1] >= 1 && view.sizes[1] <= most_tokens, op, ": q has ", view.sizes[1],
        " tokens for each slot, expected 1 to ", most_tokens);
  check_heads(op, view, reader.kv);
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
  check_soft_cap(op, options.softcap);
  check(options.window >= 0, op, ": window is ", options.window, ", expected 0 or more");
  call.scale = finite_float(op, "scale", options.scale);
  call.soft_cap = float(options.softcap);
  call.window = options.window;
  call.alibi_slopes = floats_of_heads(op, {"alibi_slopes"}, options.alibi_slopes, view);
  call.sinks = floats_of_heads(op, {"sinks"}, options.sinks, view);
  Tensor out = new_tensor(view, call.q.dtype);
  Tensor lse = new_tensor(view.sizes, 3, torch_code(Dtype::float32), view);
  call.out = out.data_ptr();
  call.lse = static_cast<float*>(lse.data_ptr());
  if (view.numel > 0) run(call, view.device_index);
  return {std::move(out), std::move(lse)};
}

}  // namespace dsx
