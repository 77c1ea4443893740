// Adagrad on CUDA.
#include "optimizers/adagrad.h"

namespace dsx {
#include "optimizers/adagrad_math.inl"
}

#include "optimizers/step_cuda.cuh"

namespace dsx {

void step_cuda(const StepCall<Adagrad>& call, const StepTensor<Adagrad::kStates>* tensors,
               int64_t count, Prepared<Adagrad>* prepared, void* stream) {
  cuda::queue_step(call, tensors, count, prepared, stream);
}

}  // namespace dsx
