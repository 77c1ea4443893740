// Registers the CPU kernel of adam_step_; the schema is in deepspeed_ext/ops/adam.py.
#include "optimizers/adam_ops.h"

#include <torch/csrc/stable/ops.h>

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // about 25 us of work: less is not worth a thread

struct Cpu {
  static void run(const AdamCall& call, const std::vector<AdamTensor>& tensors, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    if (call.options.found_inf.value() != 0) return;
    std::vector<int64_t> tensor_begin{0};
    tensor_begin.reserve(tensors.size() + 1);
    for (const AdamTensor& tensor : tensors) {
      *tensor.step += 1;
      tensor_begin.push_back(tensor_begin.back() + tensor.n);
    }
    torch::stable::parallel_for(0, tensor_begin.back(), kElementsPerThread,
                                [&](int64_t begin, int64_t end) {
      adam_cpu(isa, call, tensors.data(), tensor_begin.data(), int64_t(tensors.size()), begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("adam_step_", &boxed<&adam_step_<Cpu>>);
}

}  // namespace dsx
