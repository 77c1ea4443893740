// Adagrad on the CPU: the loops of every ISA.
#include "common/simd/prefetch.h"
#include "optimizers/adagrad.h"

#define DSX_KERNEL_SOURCE "optimizers/adagrad_cpu.inl"
#include "common/simd/foreach_isa.h"
#include "optimizers/step_cpu.h"

namespace dsx {

void step_cpu(Isa isa, const StepCall<Adagrad>& call, const StepTensor<Adagrad::kStates>* tensors,
              const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end) {
  walk(isa, call, tensors, tensor_begin, count, begin, end);
}

}  // namespace dsx
