// Adam, AdamW and AMSGrad: state, options and constants. No torch: plain numbers.
#pragma once

#include <cmath>

#include "optimizers/power.h"
#include "optimizers/step.h"

namespace dsx {

struct Adam {
  static constexpr const char* kOp = "adam_step_";
  static constexpr const char* kStateNames[] = {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
  static constexpr int kStates = 3;
  static constexpr int kRequiredStates = 2, kUsualStates = 2;
  DSX_HOST_DEVICE static constexpr bool is_signed(int state) { return state == 0; }

  struct Options {
    double beta1, beta2, eps, weight_decay;
    bool decoupled;        // true: AdamW; false: Adam, whose weight decay is an L2 penalty
    bool bias_correction;  // false: the running means are taken as they are
    bool amsgrad;          // divides by the largest second moment; else that state is absent
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    return {.beta1 = in.decay_rate("beta1"),
            .beta2 = in.decay_rate("beta2"),
            .eps = in.number(),
            .weight_decay = in.number(),
            .decoupled = in.flag(),
            .bias_correction = in.flag(),
            .amsgrad = in.has_state(2)};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // Adam: weight_decay; AdamW: 0
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float inverse_root_bias_correction2;  // 1 / sqrt(1 - beta2^step_count)
    float eps;
    float step_size;                 // lr / (1 - beta1^step_count)
    float decay;                     // AdamW: lr * weight_decay; Adam: 0
    bool has_l2_penalty, has_decay;  // not 0
    bool amsgrad;
  };

  DSX_HOST_DEVICE static void leave_out_optional_states(Constants& constants) {
    constants.amsgrad = false;
  }

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float step_count) {
    const bool correct = options.bias_correction;
    const float l2_penalty = float(options.decoupled ? 0 : options.weight_decay);
    const float decay = float(options.decoupled ? lr * options.weight_decay : 0);
    const double bias_correction1 = correct ? 1 - power(options.beta1, int64_t(step_count)) : 1;
    const double bias_correction2 = correct ? 1 - power(options.beta2, int64_t(step_count)) : 1;
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = l2_penalty,
        .beta1 = float(options.beta1),
        .one_minus_beta1 = float(1 - options.beta1),
        .beta2 = float(options.beta2),
        .one_minus_beta2 = float(1 - options.beta2),
        .inverse_root_bias_correction2 = float(1 / std::sqrt(bias_correction2)),
        .eps = float(options.eps),
        .step_size = float(lr / bias_correction1),
        .decay = decay,
        .has_l2_penalty = l2_penalty != 0,
        .has_decay = decay != 0,
        .amsgrad = options.amsgrad,
    };
  }
};

}  // namespace dsx
