// Registers the CPU kernels of swiglu; the schemas are in deepspeed_ext/ops/transformer/swiglu.py.
#include "transformer/swiglu_ops.h"

#include <torch/csrc/stable/ops.h>

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // some 10 us: less is not worth a thread

struct Cpu {
  static void run(const Swiglu& call, int /*device*/) { for_all_elements(call, &swiglu_cpu); }
  static void run(const SwigluBackward& call, int /*device*/) {
    for_all_elements(call, &swiglu_backward_cpu);
  }

 private:
  template <class Call>
  static void for_all_elements(const Call& call,
                               void (*function)(Isa, const Call&, int64_t, int64_t)) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    torch::stable::parallel_for(
        0, call.rows * call.length, kElementsPerThread,
        [&](int64_t begin, int64_t end) { function(isa, call, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("swiglu", &boxed<&swiglu<Cpu>>);
  library.impl("swiglu.packed", &boxed<&swiglu_packed<Cpu>>);
  library.impl("swiglu_backward", &boxed<&swiglu_backward<Cpu>>);
  library.impl("swiglu_backward.packed", &boxed<&swiglu_packed_backward<Cpu>>);
}

}  // namespace dsx
