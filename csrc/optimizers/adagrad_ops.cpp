// Registers the CPU kernel of adagrad_step_; the schema is in deepspeed_ext/ops/adagrad.py.
#include "optimizers/adagrad_ops.h"
#include "optimizers/step_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("adagrad_step_", &boxed<&adagrad_step_<Cpu>>);
}

}  // namespace dsx
