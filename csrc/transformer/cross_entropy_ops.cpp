// Registers the CPU kernels of cross_entropy; the schemas are in
// deepspeed_ext/ops/transformer/cross_entropy.py.
#include "transformer/cross_entropy_ops.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 16384;  // some 5 us: less is not worth a thread

int64_t grain_of(int64_t length) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, length));
}

void check_targets(const char* op, const CrossEntropy& call) {
  for (int64_t row = 0; row < call.rows; ++row) {
    const int64_t target = call.targets[row];
    check(target == call.ignored || (target >= 0 && target < call.length), op, ": target has ",
          target, " as its element number ", row, ", expected 0 to ", call.length - 1, ", or ",
          call.ignored, " for a row that is ignored");
  }
}

struct Cpu {
  static void run(const CrossEntropy& call, Reduction reduction, float* divisor, float* loss,
                  int /*device*/) {
    check_targets(kCrossEntropy, call);
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    *divisor = 1;
    if (reduction == Reduction::mean) {
      *divisor =
          float(call.rows - std::count(call.targets, call.targets + call.rows, call.ignored));
    }
    torch::stable::parallel_for(
        0, call.rows, grain_of(call.length),
        [&](int64_t begin, int64_t end) { cross_entropy_cpu(isa, call, begin, end); });
    if (loss == nullptr) return;
    double sum = 0;
    for (int64_t row = 0; row < call.rows; ++row) sum += double(call.losses[row]);
    *loss = float(sum / double(*divisor));
  }

  static void run_backward(const CrossEntropy& call, int /*device*/) {
    check_targets("cross_entropy_backward", call);
    const Isa isa = current_isa();
    torch::stable::parallel_for(
        0, call.rows, grain_of(call.length),
        [&](int64_t begin, int64_t end) { cross_entropy_backward_cpu(isa, call, begin, end); });
  }

  static void scale(Rows rows, int64_t count, int64_t length, const float* factors, int64_t pitch,
                    int /*device*/) {
    const Isa isa = current_isa();
    torch::stable::parallel_for(0, count, grain_of(length), [&](int64_t begin, int64_t end) {
      scale_rows_cpu(isa, rows, length, factors, pitch, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("cross_entropy", &boxed<&cross_entropy<Cpu>>);
  library.impl("cross_entropy_", &boxed<&cross_entropy_in_place<Cpu>>);
  library.impl("cross_entropy_backward", &boxed<&cross_entropy_backward<Cpu>>);
  library.impl("cross_entropy_scale_", &boxed<&cross_entropy_scale<Cpu>>);
}

}  // namespace dsx
