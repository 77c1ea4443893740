// One element of an Adam step in double, as the papers write it: what test_adam.cpp compares with.
#pragma once

#include <cmath>

#include "optimizers/adam.h"

struct AdamElement {
  double param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

struct AdamExpected {
  AdamElement value;
  AdamElement scale;  // the sum of the magnitudes that each value was computed from
};

inline double torch_maximum(double a, double b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b);
}

inline AdamExpected adam_reference(const dsx::StepCall<dsx::Adam>& call, double step, double grad,
                                   const AdamElement& old) {
  const dsx::Adam::Options& options = call.options;
  const double lr = call.lr.value();
  const double sign = call.maximize ? -1 : 1;
  const double decay = options.decoupled ? 0 : options.weight_decay * old.param;
  const double scaled = sign * grad / call.grad_scale.value();
  grad = scaled + decay;
  const double magnitude = std::fabs(scaled) + std::fabs(decay);

  AdamExpected result;
  AdamElement& value = result.value;
  AdamElement& scale = result.scale;
  const double beta1 = options.beta1;
  const double beta2 = options.beta2;
  value.exp_avg = beta1 * old.exp_avg + (1 - beta1) * grad;
  scale.exp_avg = beta1 * std::fabs(old.exp_avg) + (1 - beta1) * magnitude;
  value.exp_avg_sq = beta2 * old.exp_avg_sq + (1 - beta2) * grad * grad;
  scale.exp_avg_sq = beta2 * old.exp_avg_sq + (1 - beta2) * magnitude * magnitude;
  value.max_exp_avg_sq = torch_maximum(old.max_exp_avg_sq, value.exp_avg_sq);
  scale.max_exp_avg_sq = torch_maximum(old.max_exp_avg_sq, scale.exp_avg_sq);
  const double second = options.amsgrad ? value.max_exp_avg_sq : value.exp_avg_sq;

  const double correction1 = options.bias_correction ? 1 - std::pow(beta1, step) : 1;
  const double correction2 = options.bias_correction ? 1 - std::pow(beta2, step) : 1;
  const double denominator = std::sqrt(second) / std::sqrt(correction2) + options.eps;
  const double shrink = options.decoupled ? lr * options.weight_decay * old.param : 0;
  value.param = old.param - shrink - lr / correction1 * value.exp_avg / denominator;
  scale.param = std::fabs(old.param) + std::fabs(shrink) +
                lr / correction1 * scale.exp_avg / denominator *
                    (1 + scale.exp_avg_sq / (second + options.eps * options.eps));
  return result;
}
