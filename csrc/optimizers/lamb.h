// LAMB, in two passes over memory: state, options and constants. No torch: plain numbers.
#pragma once

#include <cmath>

#include "optimizers/power.h"
#include "optimizers/step.h"

namespace dsx {

// Lamb<Pass::moments> brings the moments up to date and adds up the squares of each tensor and of
// its update; Lamb<Pass::apply> subtracts the update, at a rate for each tensor.
template <Pass pass>
struct Lamb {
  static constexpr Pass kPass = pass;
  static constexpr const char* kOp = pass == Pass::apply ? "lamb_apply_" : "lamb_moments_";
  static constexpr bool kHasCoefficients = pass == Pass::apply;
  static constexpr const char* kStateNames[] = {"exp_avgs", "exp_avg_sqs"};
  static constexpr int kStates = 2, kRequiredStates = 2, kUsualStates = 2;
  DSX_HOST_DEVICE static constexpr bool is_signed(int state) { return state == 0; }

  struct Options {
    double beta1, beta2, eps, weight_decay;
    bool eps_inside_sqrt;
    bool bias_correction;  // false: the running means are taken as they are
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    return {.beta1 = in.decay_rate("beta1"),
            .beta2 = in.decay_rate("beta2"),
            .eps = in.number(),
            .weight_decay = in.number(),
            .eps_inside_sqrt = in.flag(),
            .bias_correction = in.flag()};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float inverse_bias_correction1;       // 1 / (1 - beta1^step_count)
    float inverse_bias_correction2;       // 1 / (1 - beta2^step_count)
    float inverse_root_bias_correction2;  // its root
    float eps;
    float weight_decay;
    float step_size;  // lr times the coefficient of the tensor
    bool eps_inside_sqrt;
  };

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float step_count) {
    const bool correct = options.bias_correction;
    const double bias_correction1 = correct ? 1 - power(options.beta1, int64_t(step_count)) : 1;
    const double bias_correction2 = correct ? 1 - power(options.beta2, int64_t(step_count)) : 1;
    return {
        .grad_factor = float(1 / grad_divisor),
        .beta1 = float(options.beta1),
        .one_minus_beta1 = float(1 - options.beta1),
        .beta2 = float(options.beta2),
        .one_minus_beta2 = float(1 - options.beta2),
        .inverse_bias_correction1 = float(1 / bias_correction1),
        .inverse_bias_correction2 = float(1 / bias_correction2),
        .inverse_root_bias_correction2 = float(1 / std::sqrt(bias_correction2)),
        .eps = float(options.eps),
        .weight_decay = float(options.weight_decay),
        .step_size = float(lr),
        .eps_inside_sqrt = options.eps_inside_sqrt,
    };
  }
};

using LambMoments = Lamb<Pass::moments>;
using LambApply = Lamb<Pass::apply>;

}  // namespace dsx
