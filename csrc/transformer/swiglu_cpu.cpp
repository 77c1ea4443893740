// swiglu on the CPU: picks the storage type and the instruction set.
#include "transformer/swiglu.h"

#define DSX_KERNEL_SOURCE "transformer/swiglu_cpu.inl"
#include "common/simd/foreach_isa.h"

namespace dsx {

void swiglu_cpu(Isa isa, const Swiglu& call, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, gate_elements<T>(call, begin, end));
  }, call.gate, call.up);
}

void swiglu_backward_cpu(Isa isa, const SwigluBackward& call, int64_t begin, int64_t end) {
  with_storage_type_of([&](auto storage) {
    using T = decltype(storage);
    DSX_DISPATCH_ISA(isa, backward_of_elements<T>(call, begin, end));
  }, call.gate, call.up, call.grad_out);
}

}  // namespace dsx
