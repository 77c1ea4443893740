// Softmax along the last dimension of scores that are scaled, capped, biased and masked on the way,
// and its gradient. No torch: plain pointers and numbers.
#pragma once

#include "common/math.h"
#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

// Where each row of a tensor begins that is broadcast to the shape of another.
struct BroadcastRows {
  static constexpr int kMostDims = 6;
  int dims = 0;                // leading dimensions, those that join taken as one; innermost first
  int64_t sizes[kMostDims];    // of the other tensor
  int64_t strides[kMostDims];  // elements; 0 where the tensor is broadcast

  DSX_HOST_DEVICE int64_t offset(int64_t row) const {
    int64_t offset = 0;
    for (int d = 0; d < dims; ++d) {
      const int64_t left = quotient(row, sizes[d]);
      offset += (row - left * sizes[d]) * strides[d];
      row = left;
    }
    return offset;
  }
};

// What takes part in a row is what its mask says; or the mask is added to the scores, and -inf in
// it leaves out whatever the score is.
struct SoftmaxMask {
  enum class Kind : int8_t { none, takes_part, left_out, added };
  Kind kind = Kind::none;
  Dtype dtype = Dtype::float32;  // of one that is added; the others are bytes, 0 or not
  const void* data = nullptr;
  int64_t column_stride = 0;  // elements
  BroadcastRows rows;
};

// What row i of x becomes scores by: it is query i % queries, at position i % queries + offset
// among the keys, which are the columns.
struct Scores {
  float scale = 1;
  float soft_cap = 0;  // 0: none
  int64_t queries = 1, offset = 0;
  int64_t before = -1, after = -1;  // keys that a query sees beside that of its position; -1: all
  SoftmaxMask mask;
  const float* slopes = nullptr;  // of ALiBi; null: none
  BroadcastRows slope_rows;

  DSX_HOST_DEVICE int64_t position(int64_t row) const {
    return row - quotient(row, queries) * queries + offset;
  }
};

// The keys that a row sees: [first, end), empty if end is 0.
struct Keys {
  int64_t first, end;
};

DSX_HOST_DEVICE inline Keys keys_of(const Scores& scores, int64_t row, int64_t length) {
  Keys keys{0, length};
  if (scores.before < 0 && scores.after < 0) return keys;
  const int64_t position = scores.position(row);
  if (scores.before >= 0 && position - scores.before > 0) keys.first = position - scores.before;
  if (scores.after >= 0 && position + scores.after + 1 < length) {
    keys.end = position + scores.after + 1;
  }
  return keys.first < keys.end ? keys : Keys{0, 0};
}

// A row has the same bits alone, in any batch and at any index in it; on the CPU also with any
// number of columns beyond the last one that takes part. Results never overlap anything.
struct Softmax {
  int64_t rows, length;
  Rows x, out;  // out: written
  Scores scores;
};

struct SoftmaxBackward {
  int64_t rows, length;
  Rows grad_out, out;
  Rows x;         // absent where there is no soft cap
  Rows grad_x;    // written
  Scores scores;  // of which mask and slopes do not matter: there, `out` is 0
};

// Rows [begin, end). Disjoint ranges may run on different threads. Never throws.
void softmax_cpu(Isa isa, const Softmax& softmax, int64_t begin, int64_t end);
void softmax_backward_cpu(Isa isa, const SoftmaxBackward& softmax, int64_t begin, int64_t end);

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error.
void softmax_cuda(const Softmax& softmax, void* stream);
void softmax_backward_cuda(const SoftmaxBackward& softmax, void* stream);

}  // namespace dsx
