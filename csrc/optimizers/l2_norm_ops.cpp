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
    std::vector<int64_t> tensor_begin{0}, first_chunk{0};
    tensor_begin.reserve(tensors.size() + 1);
    first_chunk.reserve(tensors.size() + 1);
    for (const NormTensor& tensor : tensors) {
      tensor_begin.push_back(tensor_begin.back() + tensor.n);
      const int64_t chunks = ceil_div(tensor.n, kReductionChunk);
      first_chunk.push_back(first_chunk.back() + chunks);
    }
    std::vector<double> squares(size_t(first_chunk.back()));
    torch::stable::parallel_for(0, tensor_begin.back(), kElementsPerThread,
                                [&](int64_t begin, int64_t end) {
      squares_of_chunks_cpu(isa, tensors.data(), tensor_begin.data(), first_chunk.data(),
                            int64_t(tensors.size()), begin, end, squares.data());
    });
    for (size_t i = 0; i < tensors.size(); ++i) {
      squared_norms[i] = 0;
      for (int64_t chunk = first_chunk[i]; chunk < first_chunk[i + 1]; ++chunk) {
        squared_norms[i] += squares[size_t(chunk)];
      }
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deepspeed_ext, CPU, library) {
  library.impl("squared_norms", &boxed<&squared_norms<Cpu>>);
}

}  // namespace dsx
