// Root mean square normalization and layer normalization along the last dimension, and their
// gradients. No torch: plain pointers and numbers. The two are one but for the mean, which layer
// normalization takes away first; a library has one of them, which DSX_NORM names.
#pragma once

#include "common/math.h"
#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

struct RmsNorm {
  static constexpr const char* kOp = "rms_norm";
  static constexpr const char* kBackwardOp = "rms_norm_backward";
  static constexpr bool kCentered = false;
};

struct LayerNorm {
  static constexpr const char* kOp = "layer_norm";
  static constexpr const char* kBackwardOp = "layer_norm_backward";
  static constexpr bool kCentered = true;
};

// A row has the same bits alone, in any batch and at any place in it: its sums depend on its length
// only, on CUDA also on the dtypes and on whether there is a residual. Rows of results never
// overlap anything.
struct Norm {
  int64_t rows, length;
  Rows x;
  Rows residual;  // absent: x itself is normalized
  Rows x_bias;    // one row, added to x beside the residual; absent: zeros
  // x + x_bias + residual, written; the residual's dtype. Absent: not wanted, which takes a
  // residual of the dtype of x.
  Rows sum;
  Rows weight;  // one row; absent: ones
  Rows bias;    // one row; absent: zeros
  Rows out;     // written; the dtype of x
  float eps;
  float weight_offset;  // added to a weight that is there; none: -0
};

struct NormBackward {
  int64_t rows, length;
  Rows grad_out;
  Rows grad_sum;  // what else depends on x; absent: nothing
  Rows x;         // what was normalized
  Rows weight;    // one row; absent: ones
  Rows grad_x;    // written
  float eps;
  float weight_offset;
};

// One thing for each of the vectors whose gradient adds up over all rows.
template <class Each>
struct OfVectors {
  Each weight{}, bias{}, x_bias{};
};

// Rows [begin, end). Disjoint ranges may run on different threads. Never throws.
template <class Kind>
void norm_cpu(Isa isa, const Norm& norm, int64_t begin, int64_t end);

// The gradients of vectors add up over all rows: first those of each group in float, as partial
// sums, then the groups in their order and in double. So they depend neither on threads nor on the
// ISA, and lose no digits as rows become many. There are few groups, as threads wait for one
// another after each few of them, but none of so many rows that a float would lose digits.
constexpr int64_t kEnoughGroups = 32, kLeastRowsOfGroup = 32, kMostRowsOfGroup = 128;
constexpr int64_t rows_of_group(int64_t rows) {
  const int64_t enough = ceil_div(rows, kEnoughGroups);
  return enough < kLeastRowsOfGroup  ? kLeastRowsOfGroup
         : enough > kMostRowsOfGroup ? kMostRowsOfGroup
                                     : enough;
}

// Groups of rows [begin, end): group g holds the rows from g * rows_of_group(rows) on. Writes their
// grad_x, and partial sums of those vectors that have any, [groups from `first` on, length]. Never
// throws.
template <class Kind>
void norm_backward_cpu(Isa isa, const NormBackward& norm, int64_t begin, int64_t end, int64_t first,
                       const OfVectors<float*>& partials);

// The same without partial sums, which of few rows would be much beside them: rows [begin, end), of
// which `of_rows` is told what their gradients need, and then columns [begin, end) of the gradients
// of vectors. Never throw.
constexpr int64_t kFloatsOfRow = 5;
template <class Kind>
void norm_backward_rows_cpu(Isa isa, const NormBackward& norm, int64_t begin, int64_t end,
                            float* of_rows);  // [rows, kFloatsOfRow] written
template <class Kind>
void norm_backward_columns_cpu(Isa isa, const NormBackward& norm, const float* of_rows,
                               int64_t begin, int64_t end,
                               const OfVectors<Rows>& grads);  // rows, written; absent: not wanted

// Elements [begin, end) of the gradient of a vector. Never throws.
template <class Kind>
void add_partials_cpu(Isa isa, const float* partials,  // [groups, length]
                      int64_t groups, int64_t length, int64_t begin, int64_t end,
                      double* totals,  // [length], of groups before: added to; null: none
                      Rows grad);      // one row, written; absent: there are groups to come

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error.
template <class Kind>
void norm_cuda(const Norm& norm, void* stream);
template <class Kind>
void norm_backward_cuda(const NormBackward& norm,
                        const OfVectors<Rows>& grads,  // rows, written; absent: not wanted
                        float* workspace,              // [norm_backward_workspace(norm, grads)]
                        void* stream);

// How many floats of device memory norm_backward_cuda works in.
template <class Kind>
int64_t norm_backward_workspace(const NormBackward& norm, const OfVectors<Rows>& grads);

}  // namespace dsx
