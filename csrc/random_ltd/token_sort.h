// Ids of tokens in ascending order. No torch: plain pointers and numbers.
#pragma once

#include <cstdint>

namespace dsx {

struct TokenSort {
  int64_t rows, kept, tokens;
  int32_t* ids;     // [rows, kept] sorted in place
  int32_t* before;  // on CUDA [rows, kept] of workspace unless one pass counts all tokens
};

// So many ids, and one for those that are no tokens, are counted in one pass on CUDA.
constexpr int64_t kSortedTogether = 8192;

// Rows [begin, end). Disjoint ranges may run on different threads. Never throws.
void token_sort_cpu(const TokenSort& call, int64_t begin, int64_t end);

// Queues all of it on the stream (cudaStream_t). Ids that are no tokens come last, each as
// `tokens`. Throws std::runtime_error.
void token_sort_cuda(const TokenSort& call, void* stream);

}  // namespace dsx
