// Root mean square normalization along the last dimension, and its gradient. No torch: plain
// pointers and numbers.
#pragma once

#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

// A row has the same bits alone, in any batch and at any place in it: its sums depend on its length
// only. Rows of results never overlap anything.
struct RmsNorm {
  int64_t rows, length;
  Rows x;
  Rows residual;  // absent: x itself is normalized
  Rows sum;       // x + residual, written; absent where residual is; of the same dtype
  Rows weight;    // one row; absent: ones
  Rows out;       // written; the dtype of x
  float eps;
};

struct RmsNormBackward {
  int64_t rows, length;
  Rows grad_out;
  Rows grad_sum;  // what else depends on x; absent: nothing
  Rows x;         // what was normalized
  Rows weight;    // one row; absent: ones
  Rows grad_x;    // written
  float eps;
};

// Rows [begin, end). Disjoint ranges may run on different threads. Never throws.
void rms_norm_cpu(Isa isa, const RmsNorm& norm, int64_t begin, int64_t end);

// The gradient of the weight adds up over all rows: first those of each group, in `partials`, then
// the groups in their order. So it depends neither on threads nor on the ISA.
constexpr int64_t kRowsOfPartial = 32;

// Groups of rows [begin, end): group g holds the rows from g * kRowsOfPartial on. Writes their
// grad_x, and their partial sums unless `partials` is null. Never throws.
void rms_norm_backward_cpu(Isa isa, const RmsNormBackward& norm, int64_t begin, int64_t end,
                           float* partials);  // [groups, length] written

// Elements [begin, end) of the gradient of the weight. Never throws.
void add_partials_cpu(Isa isa, const float* partials,  // [groups, length]
                      int64_t groups, int64_t length, int64_t begin, int64_t end,
                      Rows grad_weight);  // one row, written

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error.
void rms_norm_cuda(const RmsNorm& norm, void* stream);
void rms_norm_backward_cuda(const RmsNormBackward& norm,
                            Rows grad_weight,  // one row, written; absent: not wanted
                            float* workspace,  // [rms_norm_backward_workspace(norm)]
                            void* stream);

// How many floats of device memory rms_norm_backward_cuda works in, if grad_weight is wanted.
int64_t rms_norm_backward_workspace(const RmsNormBackward& norm);

}  // namespace dsx
