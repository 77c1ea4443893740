// quantized_linear and unpack_weight on the CPU, for codes of DSX_BITS: picks the instruction set.
#include "linear/quantized_linear.h"

#include "common/simd/prefetch.h"
#include "quantization/quantize.h"

#define DSX_KERNEL_SOURCE "linear/quantized_linear_cpu.inl"
#include "common/simd/foreach_isa.h"

// The same for a CPU that has an instruction for dot products of bytes; the rest of it is AVX-512.
#ifdef __x86_64__
DSX_TARGET_BEGIN("avx512vnni,avx512f,avx512bw,avx512vl,avx2,fma,f16c")
namespace dsx::avx512::vnni {
struct Dots {
  template <int kBits>
  static Ints add(Ints sum, Ints a, Ints b) {
    return _mm512_dpbusd_epi32(sum.lanes, a.lanes, b.lanes);
  }
};
#include "linear/quantized_linear_integer.inl"
}  // namespace dsx::avx512::vnni
DSX_TARGET_END
#endif

namespace dsx {

void quantized_linear_cpu(Isa isa, [[maybe_unused]] bool vnni, const QuantizedLinear& call,
                          int64_t begin, int64_t end) {
  if (!call.integer) return DSX_DISPATCH_ISA(isa, multiply_columns(call, begin, end));
#ifdef __x86_64__
  if (vnni) return avx512::vnni::multiply_columns_of_integers(call, begin, end);
#endif
  DSX_DISPATCH_ISA(isa, multiply_columns_of_integers(call, begin, end));
}

void unpack_weight_cpu(Isa isa, const PackedWeight& weight, const Rows& out, int64_t begin,
                       int64_t end) {
  DSX_DISPATCH_ISA(isa, unpack_rows(weight, out, begin, end));
}

}  // namespace dsx
