// Lion: state, options and constants. No torch: plain numbers.
#pragma once

#include "optimizers/step.h"

namespace dsx {

struct Lion {
  static constexpr const char* kOp = "lion_step_";
  static constexpr const char* kStateNames[] = {"exp_avgs"};
  static constexpr int kStates = 1;
  static constexpr int kRequiredStates = 1, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return true; }

  struct Options {
    double beta1, beta2, weight_decay;
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    return {.beta1 = in.decay_rate("beta1"),
            .beta2 = in.decay_rate("beta2"),
            .weight_decay = in.number()};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;  // lr
    float decay;      // lr * weight_decay
  };

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float /*step_count*/) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .beta1 = float(options.beta1),
        .one_minus_beta1 = float(1 - options.beta1),
        .beta2 = float(options.beta2),
        .one_minus_beta2 = float(1 - options.beta2),
        .step_size = float(lr),
        .decay = float(lr * options.weight_decay),
    };
  }
};

}  // namespace dsx
