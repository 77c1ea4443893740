// decode_attention on the CPU: picks the storage type of keys and the instruction set.
#include "attention/decode/decode.h"

#include <algorithm>

#define DSX_KERNEL_SOURCE "attention/decode/decode_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void decode_chunks_cpu(Isa isa, const DecodeAttention& call, const DecodeTasks& tasks,
                       int64_t begin, int64_t end) {
  if constexpr (DSX_KV::kQuantized) {
    DSX_DISPATCH_ISA(isa, decode_tasks<DSX_KV, DSX_KV>(call, tasks, begin, end));
  } else {
    with_storage_type(call.kv.dtype, [&](auto storage) {
      using T = decltype(storage);
      DSX_DISPATCH_ISA(isa, decode_tasks<DSX_KV, T>(call, tasks, begin, end));
    });
  }
}

void merge_chunks_cpu(Isa isa, const DecodeAttention& call, const DecodeTasks& tasks, int64_t begin,
                      int64_t end) {
  DSX_DISPATCH_ISA(isa, merge_rows(call, tasks, begin, end));
}

}  // namespace dsx
