// SGD on CUDA.
#include "optimizers/sgd.h"

namespace dsx {
#include "optimizers/sgd_math.inl"
}

#include "optimizers/step_cuda.cuh"

namespace dsx {

void step_cuda(const StepCall<Sgd>& call, const StepTensor<Sgd::kStates>* tensors, int64_t count,
               Prepared<Sgd>* prepared, void* stream) {
  cuda::queue_step(call, tensors, count, prepared, stream);
}

}  // namespace dsx
