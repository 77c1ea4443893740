// Registers the CPU kernels of quantized_linear and unpack_weight for codes of DSX_BITS; the
// schemas are in deepspeed_ext/ops/quantization/.
#include "quantization/quantized_linear_ops.h"

#include "common/torch/few_rows_cpu.h"

namespace dsx {
namespace {

struct Cpu {
  static void run(const QuantizedLinear& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const bool vnni = current_vnni();
    share_columns(call, [&](int64_t begin, int64_t end) {
      quantized_linear_cpu(isa, vnni, call, begin, end);
    });
  }

  static void unpack(const PackedWeight& weight, const Rows& out, int /*device*/) {
    const Isa isa = current_isa();
    torch::stable::parallel_for(
        0, weight.rows, grain_of(weight.length),
        [&](int64_t begin, int64_t end) { unpack_weight_cpu(isa, weight, out, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) { register_quantized_linear<Cpu>(library); }

}  // namespace dsx
