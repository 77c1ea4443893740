// A norm on the CPU, of the kind that DSX_NORM names: picks the storage type and the instruction
// set.
#include "norm/norm.h"

#include <type_traits>

#include "common/simd/past_cache.h"

#define DSX_KERNEL_SOURCE "norm/norm_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

template <class Kind>
void norm_cpu(Isa isa, const Norm& norm, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, normalize_rows<Kind, T>(norm, begin, end));
  }, norm.x, norm.residual, norm.x_bias, norm.weight, norm.bias);
}

template <class Kind>
void norm_backward_cpu(Isa isa, const NormBackward& norm, int64_t begin, int64_t end, int64_t first,
                       const OfVectors<float*>& partials) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, backward_of_groups<Kind, T>(norm, begin, end, first, partials));
  }, norm.x, norm.grad_out, norm.grad_sum, norm.weight);
}

template <class Kind>
void norm_backward_rows_cpu(Isa isa, const NormBackward& norm, int64_t begin, int64_t end,
                            float* of_rows) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, backward_of_rows<Kind, T>(norm, begin, end, of_rows));
  }, norm.x, norm.grad_out, norm.grad_sum, norm.weight);
}

template <class Kind>
void norm_backward_columns_cpu(Isa isa, const NormBackward& norm, const float* of_rows,
                               int64_t begin, int64_t end, const OfVectors<Rows>& grads) {
  DSX_DISPATCH_ISA(isa, backward_of_columns<Kind>(norm, of_rows, begin, end, grads));
}

template <class Kind>
void add_partials_cpu(Isa isa, const float* partials, int64_t groups, int64_t length, int64_t begin,
                      int64_t end, double* totals, Rows grad) {
  const Pointer<Any> target = grad.row<Any>(0);
  DSX_DISPATCH_ISA(isa, add_partials(partials, groups, length, begin, end, totals, target));
}

template void norm_cpu<DSX_NORM>(Isa, const Norm&, int64_t, int64_t);
template void norm_backward_cpu<DSX_NORM>(Isa, const NormBackward&, int64_t, int64_t, int64_t,
                                          const OfVectors<float*>&);
template void norm_backward_rows_cpu<DSX_NORM>(Isa, const NormBackward&, int64_t, int64_t, float*);
template void norm_backward_columns_cpu<DSX_NORM>(Isa, const NormBackward&, const float*, int64_t,
                                                  int64_t, const OfVectors<Rows>&);
template void add_partials_cpu<DSX_NORM>(Isa, const float*, int64_t, int64_t, int64_t, int64_t,
                                         double*, Rows);

}  // namespace dsx
