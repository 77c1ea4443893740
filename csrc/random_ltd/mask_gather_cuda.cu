// mask_gather_bert on CUDA: a block has rows of the result.
#include "random_ltd/mask_gather.h"

#include <algorithm>
#include <climits>

#include "common/cuda/check.h"
#include "common/cuda/words.cuh"

namespace dsx {
namespace {

constexpr int kMostThreads = 256;

// Elements are some words each.
template <class Word>
__global__ void __launch_bounds__(kMostThreads)
    mask_kernel(const __grid_constant__ MaskGather call, int words) {
  for (int64_t row = blockIdx.x; row < call.rows(); row += gridDim.x) {
    const MaskRow from(call, row);
    Word* const out = reinterpret_cast<Word*>(call.out) + row * call.kept * words;
    for (int64_t i = threadIdx.x; i < call.kept; i += blockDim.x) {
      const int32_t id = __ldg(from.ids + i);
      const bool is_there = from.mask != nullptr && call.is_token(id);
      const Word* const element = reinterpret_cast<const Word*>(from.mask + id * call.of_token);
      for (int w = 0; w < words; ++w) out[i * words + w] = is_there ? element[w] : Word{};
    }
  }
}

}  // namespace

void mask_gather_cuda(const MaskGather& call, void* stream) {
  constexpr const char* op = "mask_gather_bert";
  if (call.rows() == 0 || call.kept == 0) return;
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const uint64_t bits =
      uint64_t(reinterpret_cast<uintptr_t>(call.mask)) |
      uint64_t(call.bytes | call.of_sample | call.of_head | call.of_query | call.of_token);
  const unsigned blocks = unsigned(std::min<int64_t>(call.rows(), INT_MAX));
  const int threads = int(std::min<int64_t>(kMostThreads, (call.kept + 31) / 32 * 32));
  cuda::with_word(bits, [&](auto word) {
    mask_kernel<decltype(word)>
        <<<blocks, threads, 0, cudaStream_t(stream)>>>(call, int(call.bytes / sizeof(word)));
  });
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx
