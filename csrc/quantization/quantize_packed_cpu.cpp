// quantize_packed on the CPU: picks the instruction set.
#include "quantization/quantize_packed.h"

#define DSX_KERNEL_SOURCE "quantization/quantize_packed_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void quantize_packed_cpu(Isa isa, const QuantizePacked& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, quantize_packed_rows(call, begin, end));
}

}  // namespace dsx
