// Registers the CPU kernels of gated_activation; the schemas are in
// deepspeed_ext/ops/transformer/gated_activation.py.
#include "transformer/gated_activation_ops.h"

#include <torch/csrc/stable/ops.h>

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

struct Cpu {
  static void run(const GatedActivation& call, int /*device*/) {
    for_all_elements(call, &gated_activation_cpu);
  }
  static void run(const GatedActivationBackward& call, int /*device*/) {
    for_all_elements(call, &gated_activation_backward_cpu);
  }

 private:
  template <class Call>
  static void for_all_elements(const Call& call,
                               void (*function)(Isa, const Call&, int64_t, int64_t)) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    torch::stable::parallel_for(
        0, call.rows * call.length, kElementsPerThread,
        [&](int64_t begin, int64_t end) { function(isa, call, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("gated_activation", &boxed<&gated_activation<Cpu>>);
  library.impl("gated_activation.packed", &boxed<&gated_activation_packed<Cpu>>);
  library.impl("gated_activation_backward", &boxed<&gated_activation_backward<Cpu>>);
  library.impl("gated_activation_backward.packed", &boxed<&gated_activation_packed_backward<Cpu>>);
}

}  // namespace dsx
