// Adagrad: state, options and constants. No torch: plain numbers.
#pragma once

#include <cmath>

#include "optimizers/step.h"

namespace dsx {

struct Adagrad {
  static constexpr const char* kOp = "adagrad_step_";
  static constexpr const char* kStateNames[] = {"sums"};
  static constexpr int kStates = 1;
  static constexpr int kRequiredStates = 1, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return false; }

  struct Options {
    double lr_decay, eps, weight_decay;
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    return {.lr_decay = in.number(), .eps = in.number(), .weight_decay = in.number()};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // weight_decay
    float eps;
    float step_size;  // lr / (1 + (step_count - 1) * lr_decay)
  };

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float step_count) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = float(options.weight_decay),
        .eps = float(options.eps),
        .step_size = float(lr / (1 + (double(step_count) - 1) * options.lr_decay)),
    };
  }
};

}  // namespace dsx
