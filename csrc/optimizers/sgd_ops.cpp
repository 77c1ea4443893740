// Registers the CPU kernel of sgd_step_; the schema is in deepspeed_ext/ops/sgd.py.
#include "optimizers/sgd_ops.h"
#include "optimizers/step_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("sgd_step_", &boxed<&sgd_step_<Cpu>>);
}

}  // namespace dsx
