// Registers the CPU kernel of prefill_attention; the schemas are in
// deepspeed_ext/ops/transformer/prefill_attention.py.
#include "transformer/prefill_attention_ops.h"

#include <torch/csrc/stable/ops.h>

namespace dsx {
namespace {

struct Cpu {
  static void run(const PrefillAttention& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const int64_t strips = strips_of(call) * call.news.batches * call.kv.heads;
    torch::stable::parallel_for(0, strips, 1, [&](int64_t begin, int64_t end) {
      prefill_attention_cpu(isa, call, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl(DSX_KV::kPrefill, &boxed<&prefill_attention<Cpu>>);
}

}  // namespace dsx
