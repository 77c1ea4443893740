// SGD with momentum: state, options and constants. No torch: plain numbers.
#pragma once

#include "optimizers/step.h"

namespace dsx {

struct Sgd {
  static constexpr const char* kOp = "sgd_step_";
  static constexpr const char* kStateNames[] = {"momentum_buffers"};
  static constexpr int kStates = 1;
  static constexpr int kRequiredStates = 0, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return true; }

  struct Options {
    double momentum, dampening, weight_decay;  // no momentum: momentum_buffer is absent
    bool nesterov;
    bool wd_after_momentum;  // false: weight decay goes into the buffer
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    const double momentum = in.at_least_0("momentum");
    in.expect_state(0, momentum != 0);
    return {.momentum = momentum,
            .dampening = in.number(),
            .weight_decay = in.number(),
            .nesterov = in.flag(),
            .wd_after_momentum = in.flag()};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float l2_penalty;   // weight_decay, before the momentum
    float momentum;
    float one_minus_dampening;
    float late_l2_penalty;  // weight_decay, after the momentum
    float step_size;        // lr
    bool has_momentum;
    bool is_first;  // begins the buffer with the gradient
    bool nesterov;
  };

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float step_count) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .l2_penalty = float(options.wd_after_momentum ? 0 : options.weight_decay),
        .momentum = float(options.momentum),
        .one_minus_dampening = float(1 - options.dampening),
        .late_l2_penalty = float(options.wd_after_momentum ? options.weight_decay : 0),
        .step_size = float(lr),
        .has_momentum = options.momentum != 0,
        .is_first = step_count <= 1,
        .nesterov = options.nesterov,
    };
  }
};

}  // namespace dsx
