// The torch side of rope_append_, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/attention/rope_append.py.
#include "attention/cache/rope_append_ops.h"

namespace dsx {
namespace {

void rope_append(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys,
                 const Tensor& values, const Tensor& violations, const OptionalTensor& key_scales,
                 const OptionalTensor& value_scales, const Tensor& table, const Tensor& lengths,
                 const OptionalTensor& slots, const OptionalTensor& counts,
                 const OptionalTensor& frequencies, const OptionalTensor& q_weight,
                 const OptionalTensor& k_weight, bool interleaved, double scale, double eps,
                 double weight_offset) {
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  const RopeAppendOptions options{frequencies, q_weight, k_weight, interleaved,
                                  "scale",     scale,    eps,      weight_offset};
  const auto reader = read_append("rope_append_", q, k, v, violations, tensors, options, true);
  const RopeAppend& call = reader.call;
  const TensorView view(q.get());
  if (call.news.batches * call.news.tokens > 0) run(call, view.device_index);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl(DSX_KV::kAppend, &boxed<&rope_append>);
}

}  // namespace dsx
