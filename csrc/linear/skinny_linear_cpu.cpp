// skinny_linear on the CPU: picks the instruction set.
#include "linear/skinny_linear.h"

#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "linear/skinny_linear_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void skinny_linear_cpu(Isa isa, const SkinnyLinear& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, multiply_columns(call, begin, end));
}

}  // namespace dsx
