// rope on the CPU: picks the instruction set.
#include "attention/cache/rope.h"

#include <algorithm>

#include "common/simd/past_cache.h"

#define DSX_KERNEL_SOURCE "attention/cache/rope_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void rope_cpu(Isa isa, const Rope& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, rotate_tokens(call, begin, end));
}

}  // namespace dsx
