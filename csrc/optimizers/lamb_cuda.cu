// LAMB on CUDA.
#include "optimizers/lamb.h"

namespace dsx {
#include "optimizers/lamb_math.inl"
}

#include "optimizers/step_cuda.cuh"

namespace dsx {

void measure_cuda(const StepCall<LambMoments>& call, const LambTensor* tensors, int64_t count,
                  Prepared<LambMoments>* prepared, double* workspace, double* squares,
                  void* stream) {
  cuda::queue_measure(call, tensors, count, prepared, workspace, squares, stream);
}

int64_t doubles_to_measure(const LambTensor* tensors, int64_t count) {
  return cuda::doubles_of_blocks(tensors, count);
}

void step_cuda(const StepCall<LambApply>& call, const LambTensor* tensors, int64_t count,
               Prepared<LambApply>* prepared, void* stream) {
  cuda::queue_step(call, tensors, count, prepared, stream);
}

}  // namespace dsx
