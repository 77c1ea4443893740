// Registers the CPU kernels of softmax; the schemas are in
// deepspeed_ext/ops/transformer/softmax.py.
#include "transformer/softmax_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 16384;  // some 5 us: less is not worth a thread

int64_t grain_of(int64_t length) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, length));
}

struct Cpu {
  static void run(const Softmax& softmax, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    torch::stable::parallel_for(
        0, softmax.rows, grain_of(softmax.length),
        [&](int64_t begin, int64_t end) { softmax_cpu(isa, softmax, begin, end); });
  }

  static void run_backward(const SoftmaxBackward& softmax, int /*device*/) {
    const Isa isa = current_isa();
    torch::stable::parallel_for(
        0, softmax.rows, grain_of(softmax.length),
        [&](int64_t begin, int64_t end) { softmax_backward_cpu(isa, softmax, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("softmax", &boxed<&softmax<Cpu>>);
  library.impl("softmax_backward", &boxed<&softmax_backward<Cpu>>);
}

}  // namespace dsx
