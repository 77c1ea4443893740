// Registers the CPU kernels of bias_activation; the schemas are in
// deepspeed_ext/ops/transformer/bias_activation.py.
#include "transformer/bias_activation_ops.h"

#include <algorithm>
#include <memory>

#include "common/math.h"
#include "transformer/activation_ops_cpu.h"

namespace dsx {
namespace {

// Of things that have so many elements each.
int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, elements));
}

struct Cpu {
  static void run(const BiasActivation& call, int /*device*/) {
    for_all_elements(call, &bias_activation_cpu);
  }

  static void run_backward(BiasActivationBackward call, Rows grad_bias, int /*device*/) {
    const Isa isa = current_isa();
    const int64_t groups = ceil_div(call.rows, kRowsOfGroup);
    std::unique_ptr<float[]> partials;
    call.sums = grad_bias;
    if (grad_bias.data != nullptr && groups != 1) {
      partials.reset(new float[size_t(groups * call.length)]);
      call.sums = {partials.get(), call.length, Dtype::float32};
    }
    const int64_t tiles = groups * ceil_div(call.length, kColumnsOfTile);
    const int64_t of_tile =
        std::min(call.rows, kRowsOfGroup) * std::min(call.length, kColumnsOfTile);
    torch::stable::parallel_for(0, tiles, grain_of(of_tile), [&](int64_t begin, int64_t end) {
      bias_activation_backward_cpu(isa, call, begin, end);
    });
    if (partials == nullptr) return;
    torch::stable::parallel_for(0, call.length, grain_of(groups), [&](int64_t begin, int64_t end) {
      add_bias_partials_cpu(isa, partials.get(), groups, call.length, begin, end, grad_bias);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("bias_activation", &boxed<&bias_activation<Cpu>>);
  library.impl("bias_activation_backward", &boxed<&bias_activation_backward<Cpu>>);
}

}  // namespace dsx
