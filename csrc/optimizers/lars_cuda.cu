// LARS on CUDA.
#include "optimizers/lars.h"

namespace dsx {
#include "optimizers/lars_math.inl"
}

#include "optimizers/step_cuda.cuh"

namespace dsx {

void measure_cuda(const StepCall<LarsNorms>& call, const LarsTensor* tensors, int64_t count,
                  Prepared<LarsNorms>* prepared, double* workspace, double* squares, void* stream) {
  cuda::queue_measure(call, tensors, count, prepared, workspace, squares, stream);
}

int64_t doubles_to_measure(const LarsTensor* tensors, int64_t count) {
  return cuda::doubles_of_blocks(tensors, count);
}

void step_cuda(const StepCall<LarsApply>& call, const LarsTensor* tensors, int64_t count,
               Prepared<LarsApply>* prepared, void* stream) {
  cuda::queue_step(call, tensors, count, prepared, stream);
}

}  // namespace dsx
