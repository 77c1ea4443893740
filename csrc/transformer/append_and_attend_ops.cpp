// Registers the CPU kernel of append_and_attend_; the schemas are in
// deepspeed_ext/ops/transformer/append_and_attend.py.
#include "transformer/append_and_attend_ops.h"

#include "transformer/decode_attention_ops_cpu.h"
#include "transformer/rope_append_ops_cpu.h"

namespace dsx {
namespace {

struct Cpu {
  static void append(const RopeAppend& call, int device) { AppendOnCpu::run(call, device); }
  static void run(RopeAppend call, DecodeAttention attention, int device) {
    const std::unique_ptr<char[]> turned(new char[size_t(turned_bytes(attention))]);  // not filled
    turn_apart(call, attention, turned.get());
    append(call, device);
    DecodeOnCpu::run(attention, device);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl(DSX_KV::kAppendAndAttend, &boxed<&append_and_attend<Cpu>>);
}

}  // namespace dsx
