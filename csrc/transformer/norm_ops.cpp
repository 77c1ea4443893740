// Registers the CPU kernels of the norm that DSX_NORM names; the schemas are in
// deepspeed_ext/ops/transformer/norms.py.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>

#include "common/math.h"
#include "transformer/norm_ops.h"

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // some 5 us: less is not worth a thread

// Of things that have so many elements each.
int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, elements));
}

struct Cpu {
  static void run(const Norm& norm, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    torch::stable::parallel_for(
        0, norm.rows, grain_of(norm.length),
        [&](int64_t begin, int64_t end) { norm_cpu<DSX_NORM>(isa, norm, begin, end); });
  }

  static void run_backward(const NormBackward& norm, const OfVectors<Rows>& grads, int /*device*/) {
    if (norm.length == 0) return;
    const Isa isa = current_isa();
    const int64_t groups = ceil_div(norm.rows, kRowsOfPartial);
    OfVectors<std::unique_ptr<float[]>> memory;
    const auto partials_of = [&](const Rows& grad, std::unique_ptr<float[]>& kept) {
      if (grad.data != nullptr) kept.reset(new float[size_t(groups * norm.length)]);
      return kept.get();  // null: not wanted
    };
    const OfVectors<float*> partials{partials_of(grads.weight, memory.weight),
                                     partials_of(grads.bias, memory.bias),
                                     partials_of(grads.x_bias, memory.x_bias)};
    torch::stable::parallel_for(0, groups, grain_of(norm.length * kRowsOfPartial),
                                [&](int64_t begin, int64_t end) {
      norm_backward_cpu<DSX_NORM>(isa, norm, begin, end, partials);
    });
    const auto add = [&](const float* of_groups, const Rows& grad) {
      if (of_groups == nullptr) return;
      torch::stable::parallel_for(0, norm.length, grain_of(groups),
                                  [&](int64_t begin, int64_t end) {
        add_partials_cpu<DSX_NORM>(isa, of_groups, groups, norm.length, begin, end, grad);
      });
    };
    add(partials.weight, grads.weight);
    add(partials.bias, grads.bias);
    add(partials.x_bias, grads.x_bias);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) { register_norm<DSX_NORM, Cpu>(library); }

}  // namespace dsx
