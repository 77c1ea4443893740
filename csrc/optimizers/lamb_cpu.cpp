// LAMB on the CPU: the loops of every ISA.
#include "common/simd/prefetch.h"
#include "optimizers/lamb.h"

#define DSX_KERNEL_SOURCE "optimizers/lamb_cpu.inl"
#include "common/simd/foreach_isa.h"
#include "optimizers/step_cpu.h"

namespace dsx {

void measure_cpu(Isa isa, const StepCall<LambMoments>& call, const LambTensor* tensors,
                 const int64_t* tensor_begin, const int64_t* first_chunk, int64_t count,
                 int64_t begin, int64_t end, double* squares) {
  walk_chunks(isa, call, tensors, tensor_begin, first_chunk, count, begin, end, squares);
}

void step_cpu(Isa isa, const StepCall<LambApply>& call, const LambTensor* tensors,
              const int64_t* tensor_begin, int64_t count, int64_t begin, int64_t end) {
  walk(isa, call, tensors, tensor_begin, count, begin, end);
}

}  // namespace dsx
