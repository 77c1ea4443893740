// Cross entropy of rows of logits and their targets, and its gradient, without the probabilities in
// memory. No torch: plain pointers and numbers.
#pragma once

#include <cmath>

#include "common/rows.h"
#include "common/simd/isa.h"

namespace dsx {

// A row has the same bits alone, in any batch and at any index in it. The loss of a row whose
// target is `ignored` is 0, and so is its gradient. Of a target beyond the row, a kernel on CUDA
// makes NaN of both; on the CPU there is none.
struct CrossEntropy {
  int64_t rows, length;
  Rows logits;
  const int64_t* targets;  // [rows]
  int64_t ignored;
  float label_smoothing, z_loss;
  const float* divisor;     // one number, of all gradients
  const float* grad_loss;   // that the gradients are multiplied by; null: 1
  int64_t grad_loss_pitch;  // 0: one for all rows
  float* losses;            // [rows] written; null: not wanted
  float* stats;          // [2, rows] largest logit, sum of the powers of the others relative to it
  Rows grad;             // written, perhaps over the logits; absent: not wanted
  float* magnification;  // one number, written with the divisor; null: not wanted
};

// What gradients are multiplied by while they wait in memory for that of the loss. float16 would
// lose those of a mean that a loss scale makes larger only then: a power of two, which costs no
// rounding, takes the largest that there can be to the upper end of its range.
DSX_HOST_DEVICE inline float magnification_of(const CrossEntropy& call, float divisor) {
  if (call.grad.dtype != Dtype::float16) return 1.0f;
  constexpr double kLargestLogSumExp = 65600, kMost = 32768;
  const double largest_boost = 1 + 2 * double(call.z_loss) * kLargestLogSumExp;
  int exponent = 0;
  frexp(kMost * double(divisor) / largest_boost, &exponent);
  return float(ldexp(1.0, exponent < -125 ? -126 : exponent - 1));
}

// What rows are multiplied by.
struct RowFactors {
  const float* numbers;
  int64_t pitch;         // 0: one for all rows
  const float* divisor;  // one number, of all of them

  DSX_HOST_DEVICE float of(int64_t row) const { return numbers[row * pitch] / *divisor; }
};

// Rows [begin, end). Disjoint ranges may run on different threads. Never throws.
// Losses, with gradients or without; `stats` is written.
void cross_entropy_cpu(Isa isa, const CrossEntropy& call, int64_t begin, int64_t end);
// Gradients only; `stats` is read.
void cross_entropy_backward_cpu(Isa isa, const CrossEntropy& call, int64_t begin, int64_t end);
// Multiplies a row by its factor, unless that is 1.
void scale_rows_cpu(Isa isa, Rows rows, int64_t length, RowFactors factors, int64_t begin,
                    int64_t end);

// What becomes of the losses of the rows.
enum class Reduction : int8_t { none, mean, sum };

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error.
// Before: the divisor, which is the number of targets that are not ignored for the mean, else 1;
// and the magnification, if that is wanted.
void count_targets_cuda(const CrossEntropy& call, Reduction reduction, float* divisor,
                        void* stream);
void cross_entropy_cuda(const CrossEntropy& call, void* stream);
void cross_entropy_backward_cuda(const CrossEntropy& call, void* stream);
// After: the sum of the losses by the divisor.
void add_losses_cuda(const CrossEntropy& call, float* loss, void* stream);
void scale_rows_cuda(Rows rows, int64_t count, int64_t length, RowFactors factors, void* stream);

}  // namespace dsx
