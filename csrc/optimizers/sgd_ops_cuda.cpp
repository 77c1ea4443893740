// Registers the CUDA kernel of sgd_step_; the schema is in deepspeed_ext/ops/sgd.py.
#include "optimizers/sgd_ops.h"
#include "optimizers/step_ops_cuda.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("sgd_step_", &boxed<&sgd_step_<Cuda>>);
}

}  // namespace dsx
