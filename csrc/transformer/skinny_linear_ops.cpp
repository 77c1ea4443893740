// Registers the CPU kernel of skinny_linear; the schema is in
// deepspeed_ext/ops/transformer/skinny_linear.py.
#include "transformer/skinny_linear_ops.h"

#include "common/torch/few_rows_cpu.h"

namespace dsx {
namespace {

struct Cpu {
  static void run(const SkinnyLinear& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    share_columns(call,
                  [&](int64_t begin, int64_t end) { skinny_linear_cpu(isa, call, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) { register_skinny_linear<Cpu>(library); }

}  // namespace dsx
