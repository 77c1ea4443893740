// bias_activation on the CPU: picks the instruction set.
#include "elementwise/bias_activation.h"

#include <type_traits>

#include "common/simd/past_cache.h"
#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "elementwise/bias_activation_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void bias_activation_cpu(Isa isa, const BiasActivation& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, activate_elements(call, begin, end));
}

void bias_activation_backward_cpu(Isa isa, const BiasActivationBackward& call, int64_t begin,
                                  int64_t end) {
  DSX_DISPATCH_ISA(isa, backward_of_tiles(call, begin, end));
}

void add_bias_partials_cpu(Isa isa, const float* partials, int64_t groups, int64_t length,
                           int64_t begin, int64_t end, Rows grad_bias) {
  const Pointer<Any> target = grad_bias.row<Any>(0);
  DSX_DISPATCH_ISA(isa, add_partials(partials, groups, length, begin, end, nullptr, target));
}

}  // namespace dsx
