// Registers the CPU kernel of adam_step_; the schema is in deepspeed_ext/ops/adam.py.
#include "optimizers/adam_ops.h"
#include "optimizers/step_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("adam_step_", &boxed<&adam_step_<Cpu>>);
}

}  // namespace dsx
