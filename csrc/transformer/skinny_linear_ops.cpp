// Registers the CPU kernel of skinny_linear; the schema is in
// deepspeed_ext/ops/transformer/skinny_linear.py.
#include "transformer/skinny_linear_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace dsx {
namespace {

constexpr int64_t kProductsOfThread = 65536;  // some 10 us: less is not worth a thread

struct Cpu {
  static void run(const SkinnyLinear& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const int64_t of_column = std::max<int64_t>(1, call.length * call.rows);
    const int64_t grain = std::max<int64_t>(1, kProductsOfThread / of_column);
    torch::stable::parallel_for(0, call.columns, grain, [&](int64_t begin, int64_t end) {
      skinny_linear_cpu(isa, call, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("skinny_linear", &boxed<&skinny_linear<Cpu>>);
}

}  // namespace dsx
