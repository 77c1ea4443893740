// Registers the CPU kernels of quantize, dequantize and fake_quantize; the schemas are in
// deepspeed_ext/ops/quantization/.
#include "quantization/quantize_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

namespace dsx {
namespace {

constexpr int64_t kElementsOfThread = 32768;  // some 10 us: less is not worth a thread

// Shares out `count` things of so many elements each among torch's threads.
template <class Body>
void in_parallel(int64_t count, int64_t elements, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kElementsOfThread / std::max<int64_t>(1, elements));
  torch::stable::parallel_for(0, count, grain, body);
}

struct Cpu {
  static bool measures_before(const Quantize& call) {
    return call.group_rows != 1 || call.group > kMostAtOnce;
  }

  static void run(const Quantize& call, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const bool measured = measures_before(call);
    if (measured) measure(isa, call);
    const Units units(call, measured);
    in_parallel(units.count(call), std::min(units.length, call.length),
                [&](int64_t begin, int64_t end) { quantize_cpu(isa, call, measured, begin, end); });
  }

  static void run(const Dequantize& call, int /*device*/) {
    const Isa isa = current_isa();
    const Units units(call, true);
    in_parallel(units.count(call), std::min(units.length, call.length),
                [&](int64_t begin, int64_t end) { dequantize_cpu(isa, call, begin, end); });
  }

 private:
  static void measure(Isa isa, const Quantize& call) {
    const Parts parts(call);
    std::vector<Largest> found(size_t(call.bands() * call.columns() * parts.of_group));
    in_parallel(int64_t(found.size()), parts.rows * parts.columns, [&](int64_t begin, int64_t end) {
      measure_parts_cpu(isa, call, begin, end, found.data());
    });
    finish_scales_cpu(isa, call, found.data());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("quantize", &boxed<&quantize<Cpu>>);
  library.impl("dequantize", &boxed<&dequantize<Cpu>>);
  library.impl("fake_quantize", &boxed<&fake_quantize<Cpu>>);
  library.impl("fake_quantize_", &boxed<&fake_quantize_<Cpu>>);
}

}  // namespace dsx
