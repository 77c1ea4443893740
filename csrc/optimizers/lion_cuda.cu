// Lion on CUDA.
#include "optimizers/lion.h"

namespace dsx {
#include "optimizers/lion_math.inl"
}

#include "optimizers/step_cuda.cuh"

namespace dsx {

void step_cuda(const StepCall<Lion>& call, const StepTensor<Lion::kStates>* tensors, int64_t count,
               Prepared<Lion>* prepared, void* stream) {
  cuda::queue_step(call, tensors, count, prepared, stream);
}

}  // namespace dsx
