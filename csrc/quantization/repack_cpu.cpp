// repack on the CPU: picks the instruction set.
#include "quantization/repack.h"

#include <cstring>

#define DSX_KERNEL_SOURCE "quantization/repack_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

int64_t repack_elements_at_once(const Repack& call) {
  if (call.order != nullptr) return call.padded_length();
  constexpr int64_t kUsual = 1024;  // whole lines
  return call.across ? kUsual / kAcross * 2 : kUsual;
}

int64_t repack_scratch_bytes(const Repack& call) {
  return repack_elements_at_once(call) * kRepackLanes * (call.across ? kAcross : 1);
}

void repack_cpu(Isa isa, const Repack& call, uint8_t* scratch, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, repack_range(call, scratch, begin, end));
}

}  // namespace dsx
