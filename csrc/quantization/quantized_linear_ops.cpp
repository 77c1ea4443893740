// Registers the CPU kernels of quantized_linear and unpack_weight for codes of DSX_BITS; the
// schemas are in deepspeed_ext/ops/quantization/.
#include "quantization/quantized_linear_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace dsx {
namespace {

constexpr int64_t kProductsOfThread = 65536;  // some 5 us: less is not worth a thread

int64_t grain_of(int64_t products) {
  return std::max<int64_t>(1, kProductsOfThread / std::max<int64_t>(1, products));
}

struct Cpu {
  static void run(const QuantizedLinear& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const bool vnni = current_vnni();
    torch::stable::parallel_for(
        0, call.columns, grain_of(call.length * call.rows),
        [&](int64_t begin, int64_t end) { quantized_linear_cpu(isa, vnni, call, begin, end); });
  }

  static void unpack(const PackedWeight& weight, const Rows& out, int /*device*/) {
    const Isa isa = current_isa();
    torch::stable::parallel_for(
        0, weight.rows, grain_of(weight.length),
        [&](int64_t begin, int64_t end) { unpack_weight_cpu(isa, weight, out, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl(kQuantizedLinear, &boxed<&quantized_linear<Cpu>>);
  library.impl(kUnpackWeight, &boxed<&unpack_weight<Cpu>>);
}

}  // namespace dsx
