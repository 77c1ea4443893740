// The torch side of prefill_attention, for the device that this is compiled for. The schemas are in
// deepspeed_ext/ops/attention/prefill_attention.py.
#include "common/torch/device.h"
#include "attention/decode/attention_ops.h"
#include "attention/prefill/prefill.h"

namespace dsx {
namespace {

using torch::stable::Tensor;

constexpr int64_t kMostChunkTokens = 1 << 24;

#ifdef USE_CUDA
void run(const PrefillAttention& call, int device) {
  const OnDevice on(device);
  prefill_attention_cuda(call, on.stream);
}
#else
void run(const PrefillAttention& call, int /*device*/) {
  const int64_t strips = strips_of(call) * call.news.batches * call.kv.heads;
  in_parallel(strips, 1, 1, [&](Isa isa, int64_t begin, int64_t end) {
    prefill_attention_cpu(isa, call, begin, end);
  });
}
#endif

std::tuple<Tensor, Tensor> prefill_attention(
    const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& table,
    const Tensor& lengths, const OptionalTensor& key_scales, const OptionalTensor& value_scales,
    const OptionalTensor& slots, const OptionalTensor& counts, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, double scale, int64_t window, double softcap) {
  const PagedKvTensors tensors{keys,       values,       table, lengths,
                               key_scales, value_scales, slots, counts};
  const AttentionOptions options{alibi_slopes, sinks, scale, window, softcap};
  return attend("prefill_attention", kMostChunkTokens, q, tensors, options, &run);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, DSX_DEVICE, library) {
  library.impl(DSX_KV::kPrefill, &boxed<&prefill_attention>);
}

}  // namespace dsx
