// Registers the CPU kernel of decode_attention; the schemas are in
// deepspeed_ext/ops/transformer/decode_attention.py.
#include "transformer/decode_attention_ops_cpu.h"

namespace dsx {

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl(DSX_KV::kDecode, &boxed<&decode_attention<DecodeOnCpu>>);
}

}  // namespace dsx
