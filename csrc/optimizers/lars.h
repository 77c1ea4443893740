// LARS, in two passes over memory: state, options and constants. No torch: plain numbers.
#pragma once

#include "optimizers/step.h"

namespace dsx {

struct LarsState {
  static constexpr const char* kStateNames[] = {"momentum_buffers"};
  static constexpr int kStates = 1;
  static constexpr int kRequiredStates = 0, kUsualStates = 1;
  DSX_HOST_DEVICE static constexpr bool is_signed(int /*state*/) { return true; }
};

struct LarsNorms : LarsState {  // of each tensor and its gradient; has no state
  static constexpr Pass kPass = Pass::norms;
  static constexpr const char* kOp = "lars_norms";

  struct Options {};

  template <class Numbers>
  static Options read_options(Numbers& /*in*/) {
    return {};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale
  };

  DSX_HOST_DEVICE static Constants make_constants(const Options& /*options*/, double /*lr*/,
                                                  double grad_divisor, float /*step_count*/) {
    return {float(1 / grad_divisor)};
  }
};

struct LarsApply : LarsState {
  static constexpr Pass kPass = Pass::whole;
  static constexpr bool kHasCoefficients = true;
  static constexpr const char* kOp = "lars_apply_";

  struct Options {
    double momentum, weight_decay;
  };

  template <class Numbers>
  static Options read_options(Numbers& in) {
    const double momentum = in.decay_rate("momentum");
    if (!in.has_state(0)) in.expect_0("momentum", momentum, "without momentum_buffers");
    return {.momentum = momentum, .weight_decay = in.number()};
  }

  struct Constants {
    float grad_factor;  // 1 / grad_scale, negative to maximize
    float weight_decay;
    float momentum;
    float step_size;  // lr times the coefficient of the tensor
  };

  DSX_HOST_DEVICE static Constants make_constants(const Options& options, double lr,
                                                  double grad_divisor, float /*step_count*/) {
    return {
        .grad_factor = float(1 / grad_divisor),
        .weight_decay = float(options.weight_decay),
        .momentum = float(options.momentum),
        .step_size = float(lr),
    };
  }
};

}  // namespace dsx
