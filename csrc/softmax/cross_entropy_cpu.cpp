// cross_entropy on the CPU: picks the storage type and the instruction set.
#include "softmax/cross_entropy.h"

#define DSX_KERNEL_SOURCE "softmax/cross_entropy_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void cross_entropy_cpu(Isa isa, const CrossEntropy& call, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, losses_of_rows<T>(call, begin, end));
  }, call.logits, call.grad);
}

void cross_entropy_backward_cpu(Isa isa, const CrossEntropy& call, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, gradients_of_rows<T>(call, begin, end));
  }, call.logits, call.grad);
}

void scale_rows_cpu(Isa isa, Rows rows, int64_t length, RowFactors factors, int64_t begin,
                    int64_t end) {
  DSX_DISPATCH_ISA(isa, scale_rows(rows, length, factors, begin, end));
}

}  // namespace dsx
