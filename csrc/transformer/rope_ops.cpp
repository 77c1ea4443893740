// Registers the CPU kernels of rope; the schemas are in deepspeed_ext/ops/transformer/rope.py.
#include "transformer/rope_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

struct Cpu {
  static void run(const Rope& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const int64_t elements = (call.q.heads + call.k.heads) * call.width;  // of a token
    torch::stable::parallel_for(
        0, call.batches * call.tokens, std::max<int64_t>(1, kElementsPerThread / elements),
        [&](int64_t begin, int64_t end) { rope_cpu(isa, call, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("rope", &boxed<&rope<Cpu>>);
  library.impl("rope.pair", &boxed<&rope_pair<Cpu>>);
  library.impl("rope_", &boxed<&rope_in_place<Cpu>>);
}

}  // namespace dsx
