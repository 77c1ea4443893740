// rms_norm on the CPU: picks the storage type and the instruction set.
#include "transformer/rms_norm.h"

#define DSX_KERNEL_SOURCE "transformer/rms_norm_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void rms_norm_cpu(Isa isa, const RmsNorm& norm, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, normalize_rows<T>(norm, begin, end));
  }, norm.x, norm.residual, norm.weight);
}

void rms_norm_backward_cpu(Isa isa, const RmsNormBackward& norm, int64_t begin, int64_t end,
                           float* partials) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, backward_of_groups<T>(norm, begin, end, partials));
  }, norm.x, norm.grad_out, norm.weight);
}

void add_partials_cpu(Isa isa, const float* partials, int64_t groups, int64_t length, int64_t begin,
                      int64_t end, Rows grad_weight) {
  const Pointer<Any> target = grad_weight.row<Any>(0);
  DSX_DISPATCH_ISA(isa, add_partials(partials, groups, length, begin, end, target));
}

}  // namespace dsx
