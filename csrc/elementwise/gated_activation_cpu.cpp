// Gated activations on the CPU: picks the instruction set.
#include "elementwise/gated_activation.h"

#include <type_traits>

#include "common/simd/past_cache.h"
#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "elementwise/gated_activation_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void gated_activation_cpu(Isa isa, const GatedActivation& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, gate_elements(call, begin, end));
}

void gated_activation_backward_cpu(Isa isa, const GatedActivationBackward& call, int64_t begin,
                                   int64_t end) {
  DSX_DISPATCH_ISA(isa, backward_of_elements(call, begin, end));
}

}  // namespace dsx
