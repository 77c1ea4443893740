// prefill_attention on the CPU: picks the storage type of keys and the instruction set.
#include "attention/prefill/prefill.h"

#define DSX_KERNEL_SOURCE "attention/prefill/prefill_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void prefill_attention_cpu(Isa isa, const PrefillAttention& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, attend_strips<DSX_KV>(call, begin, end));
}

}  // namespace dsx
