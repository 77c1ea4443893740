// Registers the CUDA kernels of lamb_moments_ and lamb_apply_; their schemas are in
// deepspeed_ext/ops/lamb.py.
#include "optimizers/lamb_ops.h"
#include "optimizers/step_ops_cuda.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("lamb_moments_", &boxed<&lamb_moments_<Cuda>>);
  library.impl("lamb_apply_", &boxed<&lamb_apply_<Cuda>>);
}

}  // namespace dsx
