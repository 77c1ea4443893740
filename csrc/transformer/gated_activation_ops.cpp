// Registers the CPU kernels of gated_activation; the schemas are in
// deepspeed_ext/ops/transformer/gated_activation.py.
#include "transformer/gated_activation_ops.h"

#include "transformer/activation_ops_cpu.h"

namespace dsx {
namespace {

struct Cpu {
  static void run(const GatedActivation& call, int /*device*/) {
    for_all_elements(call, &gated_activation_cpu);
  }
  static void run(const GatedActivationBackward& call, int /*device*/) {
    for_all_elements(call, &gated_activation_backward_cpu);
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
