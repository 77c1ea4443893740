// Registers the CPU kernel of lion_step_; the schema is in deepspeed_ext/ops/lion.py.
#include "optimizers/lion_ops.h"
#include "optimizers/step_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("lion_step_", &boxed<&lion_step_<Cpu>>);
}

}  // namespace dsx
