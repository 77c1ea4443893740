// rope_append_ on the CPU: picks the instruction set.
#include "attention/cache/rope_append.h"

#include <algorithm>

#include "common/simd/past_cache.h"

#define DSX_KERNEL_SOURCE "attention/cache/rope_append_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void rope_append_cpu(Isa isa, const RopeAppend& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, append_tokens<DSX_KV>(call, begin, end));
}

}  // namespace dsx
