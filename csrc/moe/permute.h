// Tokens to the rows of their experts and back, and the gradients of both. No torch: plain pointers
// and numbers.
#pragma once

#include <algorithm>

#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

// Where the k copies of each token are among the rows of all experts. Rows from `*end` on are
// nobody's. On CUDA a slot that is no row is dropped.
struct Slots {
  int64_t tokens, k, rows;
  const int64_t* places;  // [tokens, k] -1: dropped
  const int32_t* end;     // one number: behind the last row of the last expert

  DSX_HOST_DEVICE bool is_row(int64_t place) const { return uint64_t(place) < uint64_t(rows); }
};

struct Permute {
  Slots slots;
  int64_t length;
  Rows x;    // of tokens
  Rows out;  // of all experts, written; one after the other, with the dtype of x
};

struct Unpermute {
  Slots slots;
  int64_t length;
  Rows y;        // of all experts
  Rows weights;  // [tokens * k] as rows of one element; absent: 1 each
  Rows out;      // of tokens, written
};

struct UnpermuteBackward {
  Slots slots;
  int64_t length;
  Rows grad_out;      // of tokens
  Rows y;             // of all experts
  Rows weights;       // [tokens * k] as rows of one element
  Rows grad_y;        // of all experts, written
  Rows grad_weights;  // [tokens * k] as rows of one element, written
};

// Tokens [begin, end). Disjoint ranges may run on different threads. Never throws.
void permute_cpu(Isa isa, const Permute& call, int64_t begin, int64_t end);
void unpermute_cpu(Isa isa, const Unpermute& call, int64_t begin, int64_t end);
void unpermute_backward_cpu(Isa isa, const UnpermuteBackward& call, int64_t begin, int64_t end);
// Besides: zeros in the rows that are nobody's.
void clear_rows_cpu(const Slots& slots, const Rows& rows, int64_t length);

// Queue all of it on the stream (cudaStream_t). They throw std::runtime_error.
void permute_cuda(const Permute& call, void* stream);
void unpermute_cuda(const Unpermute& call, void* stream);
void unpermute_backward_cuda(const UnpermuteBackward& call, void* stream);

}  // namespace dsx
