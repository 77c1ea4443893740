// Adam, AdamW and AMSGrad: options, constants and functions. No torch: plain pointers and numbers.
#pragma once

#include <cmath>

#include "common/math.h"
#include "common/power.h"
#include "common/simd/isa.h"
#include "optimizers/step.h"

namespace dsx {

struct Adam {
  static constexpr const char* kOp = "adam_step_";
  static constexpr int kStates = 3;  // exp_avg, exp_avg_sq, max_exp_avg_sq
  static constexpr int kRequiredStates = 2, kUsualStates = 2;
  DSX_HOST_DEVICE static constexpr bool is_signed(int state) { return state == 0; }

  struct Options {
    double beta1, beta2, eps, weight_decay;
    bool decoupled;        // true: AdamW; false: Adam, whose weight decay is an L2 penalty
    bool bias_correction;  // false: the running means are taken as they are
    bool amsgrad;          // divides by the largest second moment; else that state is absent
  };

  struct Step {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // Adam: weight_decay; AdamW: 0
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float inverse_root_bias_correction2;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float step_size;  // lr / (1 - beta1^step)
    float decay;      // AdamW: lr * weight_decay; Adam: 0
    bool amsgrad;
  };

  DSX_HOST_DEVICE static void leave_out_optional_states(Step& step) { step.amsgrad = false; }

  DSX_HOST_DEVICE static Step make_step(const Options& options, double lr, double grad_divisor,
                                        float step) {
    const bool correct = options.bias_correction;
    const double bias_correction1 = correct ? 1 - power(options.beta1, int64_t(step)) : 1;
    const double bias_correction2 = correct ? 1 - power(options.beta2, int64_t(step)) : 1;
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = float(options.decoupled ? 0 : options.weight_decay),
        .beta1 = float(options.beta1),
        .one_minus_beta1 = float(1 - options.beta1),
        .beta2 = float(options.beta2),
        .one_minus_beta2 = float(1 - options.beta2),
        .inverse_root_bias_correction2 = float(1 / std::sqrt(bias_correction2)),
        .eps = float(options.eps),
        .step_size = float(lr / bias_correction1),
        .decay = float(options.decoupled ? lr * options.weight_decay : 0),
        .amsgrad = options.amsgrad,
    };
  }
};

// Updates elements [begin, end) of the row that the tensors form (common/chunks.h), whose steps
// have been advanced; found_inf is not looked at. Disjoint ranges may run on different threads; the
// result does not depend on how the row is cut. Never throws.
void step_cpu(Isa isa, const StepCall<Adam>& call, const StepTensor<Adam::kStates>* tensors,
              const int64_t* tensor_begin,  // [count + 1]
              int64_t count, int64_t begin, int64_t end);

// Queues the step of all tensors on the stream, on the current device: advances their steps and
// updates them, unless found_inf says skip. Throws if a launch fails.
void step_cuda(const StepCall<Adam>& call,
               const StepTensor<Adam::kStates>* tensors,  // [count] host memory
               int64_t count,
               Prepared<Adam>* prepared,  // [count] device memory to work in
               void* stream);

}  // namespace dsx
