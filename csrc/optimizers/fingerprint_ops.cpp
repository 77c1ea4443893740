// Registers the CPU kernel of fingerprints; the schema is in
// deepspeed_ext/ops/optimizers/fingerprint.py.
#include "optimizers/fingerprint_ops.h"

#include <torch/csrc/stable/ops.h>

#include "common/chunks.h"

namespace dsx {
namespace {

constexpr int64_t kBytesPerThread = 16 * kBlockBytes;  // 10 us: less is not worth a thread

struct Cpu {
  static void run(const std::vector<Bytes>& tensors, uint64_t* fingerprints, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const std::vector<int64_t> tensor_begin =
        begins_of(tensors.size(), [&](size_t i) { return tensors[i].bytes; });
    std::fill_n(fingerprints, tensors.size(), 0);
    torch::stable::parallel_for(0, tensor_begin.back(), kBytesPerThread,
                                [&](int64_t begin, int64_t end) {
      add_fingerprints_cpu(isa, tensors.data(), tensor_begin.data(), int64_t(tensors.size()), begin,
                           end, fingerprints);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("fingerprints", &boxed<&fingerprints<Cpu>>);
}

}  // namespace dsx
