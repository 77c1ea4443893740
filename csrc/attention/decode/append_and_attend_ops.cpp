// The torch side of append_and_attend_, for the device that this is compiled for. The schemas are
// in deepspeed_ext/ops/attention/append_and_attend.py.
#include "attention/decode/attention_ops.h"
#include "attention/decode/decode_run_ops.h"
#include "attention/cache/rope_append_ops.h"

namespace dsx {
namespace {

// Of the queries that rotate_into has memory for.
int64_t rotated_bytes(const DecodeAttention& attention) {
  return attention.news.batches * attention.q.heads * attention.kv.width *
         bytes_of(attention.q.dtype);
}
// The first op writes queries there, and the second one reads them there.
void rotate_into(RopeAppend& append, DecodeAttention& attention, void* memory) {
  const int64_t heads = attention.q.heads, width = attention.kv.width;
  attention.q = {memory, heads, heads * width, heads * width, width, attention.q.dtype};
  append.q_out = attention.q;
}

#ifdef USE_CUDA
void run_both(RopeAppend append, DecodeAttention attention, int device) {
  const OnDevice on(device);
  if (decode_in_clusters_cuda(attention, &append, on.stream)) return;
  const Tensor rotated = cuda_workspace(rotated_bytes(attention), device);
  rotate_into(append, attention, rotated.data_ptr());
  run(append, device);
  run(attention, device);
}
#else
void run_both(RopeAppend append, DecodeAttention attention, int device) {
  const std::unique_ptr<char[]> rotated(new char[size_t(rotated_bytes(attention))]);  // not filled
  rotate_into(append, attention, rotated.get());
  run(append, device);
  run(attention, device);
}
#endif

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
    run_both(reader.call, attention, device);
  });
  const bool without_queries = view.sizes[0] > 0 && view.numel == 0;
  if (without_queries) run(reader.call, view.device_index);
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl(DSX_KV::kAppendAndAttend, &boxed<&append_and_attend>);
}

}  // namespace dsx
