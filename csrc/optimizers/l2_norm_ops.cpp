// Registers the CPU kernel of squared_norms; the schema is in deepspeed_ext/ops/l2_norm.py.
#include "optimizers/l2_norm_ops.h"

#include <torch/csrc/stable/ops.h>

#include "common/chunks.h"

namespace dsx {
namespace {

constexpr int64_t kElementsPerThread = 2 * kReductionChunk;  // 10 us: less is not worth a thread

struct Cpu {
  static void run(const std::vector<NormTensor>& tensors, double* squared_norms, int /*device*/) {
    const Isa isa = current_isa();  // may throw, and nothing may throw in a parallel region
    const std::vector<int64_t> tensor_begin =
        begins_of(tensors.size(), [&](size_t i) { return tensors[i].n; });
    const std::vector<int64_t> first_chunk = begins_of(
        tensors.size(), [&](size_t i) { return ceil_div(tensors[i].n, kReductionChunk); });
    std::vector<double> squares(size_t(first_chunk.back()));
    torch::stable::parallel_for(0, tensor_begin.back(), kElementsPerThread,
                                [&](int64_t begin, int64_t end) {
      squares_of_chunks_cpu(isa, tensors.data(), tensor_begin.data(), first_chunk.data(),
                            int64_t(tensors.size()), begin, end, squares.data());
    });
    add_chunks(squares.data(), first_chunk, 1, squared_norms);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("squared_norms", &boxed<&squared_norms<Cpu>>);
}

}  // namespace dsx
