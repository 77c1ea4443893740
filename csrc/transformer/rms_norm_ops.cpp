// Registers the CPU kernels of rms_norm; the schemas are in
// deepspeed_ext/ops/transformer/rms_norm.py.
#include "transformer/rms_norm_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>

#include "common/math.h"

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // some 5 us: less is not worth a thread

// Of things that have so many elements each.
int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, elements));
}

struct Cpu {
  static void run(const RmsNorm& norm, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    torch::stable::parallel_for(
        0, norm.rows, grain_of(norm.length),
        [&](int64_t begin, int64_t end) { rms_norm_cpu(isa, norm, begin, end); });
  }

  static void run_backward(const RmsNormBackward& norm, Rows grad_weight, int /*device*/) {
    const Isa isa = current_isa();
    const int64_t groups = ceil_div(norm.rows, kRowsOfPartial);
    std::unique_ptr<float[]> memory;
    if (grad_weight.data != nullptr) memory.reset(new float[size_t(groups * norm.length)]);
    float* partials = memory.get();  // null: not wanted
    torch::stable::parallel_for(0, groups, grain_of(norm.length * kRowsOfPartial),
                                [&](int64_t begin, int64_t end) {
      rms_norm_backward_cpu(isa, norm, begin, end, partials);
    });
    if (grad_weight.data == nullptr) return;
    torch::stable::parallel_for(0, norm.length, grain_of(groups), [&](int64_t begin, int64_t end) {
      add_partials_cpu(isa, partials, groups, norm.length, begin, end, grad_weight);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("rms_norm", &boxed<&rms_norm<Cpu>>);
  library.impl("rms_norm.residual", &boxed<&rms_norm_residual<Cpu>>);
  library.impl("rms_norm_backward", &boxed<&rms_norm_backward<Cpu>>);
}

}  // namespace dsx
