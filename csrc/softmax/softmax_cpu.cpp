// softmax on the CPU: picks the storage type and the instruction set.
#include "softmax/softmax.h"

#include "common/simd/past_cache.h"

#define DSX_KERNEL_SOURCE "softmax/softmax_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void softmax_cpu(Isa isa, const Softmax& softmax, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, softmax_rows<T>(softmax, begin, end));
  }, softmax.x, softmax.out);
}

void softmax_backward_cpu(Isa isa, const SoftmaxBackward& softmax, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, softmax_backward_rows<T>(softmax, begin, end));
  }, softmax.out, softmax.grad_out, softmax.x, softmax.grad_x);
}

}  // namespace dsx
