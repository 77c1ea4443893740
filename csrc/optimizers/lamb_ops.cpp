// Registers the CPU kernels of lamb_moments_ and lamb_apply_; their schemas are in
// deepspeed_ext/ops/lamb.py.
#include "optimizers/lamb_ops.h"
#include "optimizers/step_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("lamb_moments_", &boxed<&lamb_moments_<Cpu>>);
  library.impl("lamb_apply_", &boxed<&lamb_apply_<Cpu>>);
}

}  // namespace dsx
