// Registers the CPU kernel of rope_append_; the schemas are in
// deepspeed_ext/ops/transformer/rope_append.py.
#include "transformer/rope_append_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl(DSX_KV::kAppend, &boxed<&rope_append<AppendOnCpu>>);
}

}  // namespace dsx
