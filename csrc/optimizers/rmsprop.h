// RMSprop: state, options and constants. No torch: plain numbers.
#pragma once

#include "optimizers/step.h"

namespace dsx {

struct Rmsprop {
  static constexpr const char* kOp = "rmsprop_step_";
  static constexpr const char* kStateNames[] = {"square_avgs", "grad_avgs", "momentum_buffers"};
  static constexpr int kStates = 3;
  static constexpr int kRequiredStates = 1, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int state) { return state != 0; }

  struct Options {
    double alpha, eps, momentum, weight_decay;  // no momentum: momentum_buffer is absent
    bool centered;                              // else grad_avg is absent
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    const Options options{.alpha = in.decay_rate("alpha"),
                          .eps = in.number(),
                          .momentum = in.at_least_0("momentum"),
                          .weight_decay = in.number(),
                          .centered = in.has_state(1)};
    in.expect_state(2, options.momentum != 0);
    return options;
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // weight_decay
    float alpha, one_minus_alpha;
    float eps;
    float momentum;
    float step_size;  // lr
    bool has_momentum, centered;
  };

  DSX_HOST_DEVICE static void leave_out_optional_states(Constants& constants) {
    constants.has_momentum = constants.centered = false;
  }

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float /*step_count*/) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = float(options.weight_decay),
        .alpha = float(options.alpha),
        .one_minus_alpha = float(1 - options.alpha),
        .eps = float(options.eps),
        .momentum = float(options.momentum),
        .step_size = float(lr),
        .has_momentum = options.momentum != 0,
        .centered = options.centered,
    };
  }
};

}  // namespace dsx
