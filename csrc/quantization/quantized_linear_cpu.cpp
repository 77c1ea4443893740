// quantized_linear and unpack_weight on the CPU, for codes of DSX_BITS: picks the instruction set.
#include "quantization/quantized_linear.h"

#include "common/simd/prefetch.h"

#define DSX_KERNEL_SOURCE "quantization/quantized_linear_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void quantized_linear_cpu(Isa isa, const QuantizedLinear& call, int64_t begin, int64_t end) {
  DSX_DISPATCH_ISA(isa, multiply_columns(call, begin, end));
}

void unpack_weight_cpu(Isa isa, const PackedWeight& weight, const Rows& out, int64_t begin,
                       int64_t end) {
  DSX_DISPATCH_ISA(isa, unpack_rows(weight, out, begin, end));
}

}  // namespace dsx
