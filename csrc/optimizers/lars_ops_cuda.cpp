// Registers the CUDA kernels of lars_norms and lars_apply_; their schemas are in
// deepspeed_ext/ops/lars.py.
#include "optimizers/lars_ops.h"
#include "optimizers/step_ops_cuda.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CUDA, library) {
  library.impl("lars_norms", &boxed<&lars_norms<Cuda>>);
  library.impl("lars_apply_", &boxed<&lars_apply_<Cuda>>);
}

}  // namespace dsx
