// Registers the CPU kernel of quantize_packed_; the schema is in deepspeed_ext/ops/quantization/.
#include "quantization/quantize_packed_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace dsx {
namespace {

constexpr int64_t kElementsOfThread = 32768;  // some 20 us: less is not worth a thread

struct Cpu {
  static void run(const QuantizePacked& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const int64_t of_row = std::max<int64_t>(1, call.padded_length());
    const int64_t grain = std::max<int64_t>(1, kElementsOfThread / of_row);
    torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) {
      quantize_packed_cpu(isa, call, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("quantize_packed_", &boxed<&quantize_packed_<Cpu>>);
}

}  // namespace dsx
