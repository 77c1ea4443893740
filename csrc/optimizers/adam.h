// One Adam or AdamW step over a list of tensors, in place. No torch: plain pointers and numbers.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/math.h"
#include "common/pointer.h"
#include "common/power.h"
#include "common/scalar.h"
#include "common/simd/isa.h"

namespace dsx {

struct AdamOptions {
  Scalar lr;
  double beta1, beta2, eps, weight_decay;
  bool decoupled;        // true: AdamW; false: Adam, whose weight decay is an L2 penalty
  bool maximize;         // steps up the gradient
  bool bias_correction;  // false: the running means are taken as they are
  Scalar grad_scale;     // gradients are divided by it first
  Scalar found_inf;      // not 0: the step is skipped, nothing is modified
};

// One parameter with its gradient and state, all in the memory order of the parameter. What is
// written overlaps nothing else in the list.
struct AdamTensor {
  void* param;           // [n] updated
  void* grad;            // [n] read only
  void* exp_avg;         // [n] updated
  void* exp_avg_sq;      // [n] updated
  void* max_exp_avg_sq;  // [n] updated; or null: not AMSGrad
  void* param_copy;      // [n] receives the new param, rounded; or null
  float* step;           // [1] steps taken
  int64_t n;
};

struct AdamCall {  // what all tensors of a call share
  AdamOptions options;
  Dtype param, grad, moment, param_copy;  // moment: of exp_avg, exp_avg_sq and max_exp_avg_sq
};

struct AdamStep {      // what the loops need of the options and the step, worked out in double
  float grad_divisor;  // grad_scale, negative to maximize
  float l2_penalty;    // Adam: weight_decay; AdamW: 0
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float inverse_root_bias_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)
  float decay;      // AdamW: lr * weight_decay; Adam: 0
};

// `step` counts this step as taken: the first is 1. Same bits on the host and in CUDA.
DSX_HOST_DEVICE inline AdamStep make_adam_step(const AdamOptions& options, float step) {
  const double lr = options.lr.value();
  const double scale = options.grad_scale.value();
  const bool correct = options.bias_correction;
  const double bias_correction1 = correct ? 1 - power(options.beta1, int64_t(step)) : 1;
  const double bias_correction2 = correct ? 1 - power(options.beta2, int64_t(step)) : 1;
  AdamStep result;
  result.grad_divisor = float(options.maximize ? -scale : scale);
  result.l2_penalty = float(options.decoupled ? 0 : options.weight_decay);
  result.beta1 = float(options.beta1);
  result.one_minus_beta1 = float(1 - options.beta1);
  result.beta2 = float(options.beta2);
  result.one_minus_beta2 = float(1 - options.beta2);
  result.inverse_root_bias_correction2 = float(1 / std::sqrt(bias_correction2));
  result.eps = float(options.eps);
  result.step_size = float(lr / bias_correction1);
  result.decay = float(options.decoupled ? lr * options.weight_decay : 0);
  return result;
}

// Updates elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throws.
void adam_cpu(Isa isa, const AdamCall& call,
              const AdamTensor* tensors,    // [count]
              const int64_t* tensor_begin,  // [count + 1]
              int64_t count, int64_t begin, int64_t end);

// Queues the step of all tensors on the stream, on the current device: advances their steps and
// updates them, unless found_inf says skip. Throws if a launch fails.
void adam_cuda(const AdamCall& call,
               const AdamTensor* tensors,  // [count] host memory
               int64_t count,
               AdamStep* constants,  // [count] device memory to work in
               void* stream);

// The storage types that have a loop of their own: Param, Grad, Moment. Every other combination
// runs the same loop with Any, which chooses the conversion at run time, vector by vector.
#define DSX_ADAM_STORAGE_TYPES(APPLY) \
  APPLY(float, float, float)          \
  APPLY(float, BFloat16, float)       \
  APPLY(BFloat16, BFloat16, float)    \
  APPLY(BFloat16, BFloat16, BFloat16) \
  APPLY(Any, Any, Any)

}  // namespace dsx
