// One element of an optimizer's step in double, as the papers write it: what test_steps.cpp
// compares with.
#pragma once

#include <cmath>

#include "optimizers/adagrad.h"
#include "optimizers/adam.h"
#include "optimizers/lion.h"
#include "optimizers/rmsprop.h"
#include "optimizers/sgd.h"

constexpr double kRelative = 1e-6;  // what arithmetic in float may be off by, of the scale

struct Element {
  double param;
  double states[3];
};

struct Expected {
  Element value;
  Element scale;  // the sum of the magnitudes that each value was computed from
};

inline double torch_maximum(double a, double b) {
  return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b);
}

// The gradient as the formulas take it.
template <class Rule>
double scaled(const dsx::StepCall<Rule>& call, double grad) {
  return (call.maximize ? -grad : grad) / call.grad_scale.value();
}

inline Expected reference(const dsx::StepCall<dsx::Adam>& call, double step, double grad,
                          const Element& old) {
  const dsx::Adam::Options& options = call.options;
  const auto& [old_exp_avg, old_exp_avg_sq, old_max] = old.states;
  const double lr = call.lr.value();
  const double decay = options.decoupled ? 0 : options.weight_decay * old.param;
  const double magnitude = std::fabs(scaled(call, grad)) + std::fabs(decay);
  grad = scaled(call, grad) + decay;

  Expected result;
  auto& [exp_avg, exp_avg_sq, max_exp_avg_sq] = result.value.states;
  auto& [exp_avg_scale, exp_avg_sq_scale, max_scale] = result.scale.states;
  const double beta1 = options.beta1;
  const double beta2 = options.beta2;
  exp_avg = beta1 * old_exp_avg + (1 - beta1) * grad;
  exp_avg_scale = beta1 * std::fabs(old_exp_avg) + (1 - beta1) * magnitude;
  exp_avg_sq = beta2 * old_exp_avg_sq + (1 - beta2) * grad * grad;
  exp_avg_sq_scale = beta2 * old_exp_avg_sq + (1 - beta2) * magnitude * magnitude;
  max_exp_avg_sq = torch_maximum(old_max, exp_avg_sq);
  max_scale = torch_maximum(old_max, exp_avg_sq_scale);
  const double second = options.amsgrad ? max_exp_avg_sq : exp_avg_sq;

  const double correction1 = options.bias_correction ? 1 - std::pow(beta1, step) : 1;
  const double correction2 = options.bias_correction ? 1 - std::pow(beta2, step) : 1;
  const double denominator = std::sqrt(second) / std::sqrt(correction2) + options.eps;
  const double shrink = options.decoupled ? lr * options.weight_decay * old.param : 0;
  result.value.param = old.param - shrink - lr / correction1 * exp_avg / denominator;
  result.scale.param = std::fabs(old.param) + std::fabs(shrink) +
                       lr / correction1 * exp_avg_scale / denominator *
                           (1 + exp_avg_sq_scale / (second + options.eps * options.eps));
  return result;
}

inline Expected reference(const dsx::StepCall<dsx::Lion>& call, double /*step*/, double grad,
                          const Element& old) {
  const dsx::Lion::Options& options = call.options;
  const double old_exp_avg = old.states[0], lr = call.lr.value();
  grad = scaled(call, grad);
  const double direction = options.beta1 * old_exp_avg + (1 - options.beta1) * grad;
  const double magnitude =
      options.beta1 * std::fabs(old_exp_avg) + (1 - options.beta1) * std::fabs(grad);
  const double sign = direction > 0 ? 1 : direction < 0 ? -1 : direction;
  const bool undecided = magnitude != 0 && std::fabs(direction) <= kRelative * magnitude;

  Expected result{};
  result.value.param = old.param - lr * (sign + options.weight_decay * old.param);
  result.scale.param =
      std::fabs(old.param) * (1 + lr * options.weight_decay) + lr * (undecided ? 2 / kRelative : 1);
  result.value.states[0] = options.beta2 * old_exp_avg + (1 - options.beta2) * grad;
  result.scale.states[0] =
      options.beta2 * std::fabs(old_exp_avg) + (1 - options.beta2) * std::fabs(grad);
  return result;
}

inline Expected reference(const dsx::StepCall<dsx::Adagrad>& call, double step, double grad,
                          const Element& old) {
  const dsx::Adagrad::Options& options = call.options;
  const double decay = options.weight_decay * old.param;
  const double magnitude = std::fabs(scaled(call, grad)) + std::fabs(decay);
  grad = scaled(call, grad) + decay;

  Expected result{};
  const double sum = old.states[0] + grad * grad;
  const double sum_scale = old.states[0] + magnitude * magnitude;
  const double rate = call.lr.value() / (1 + (step - 1) * options.lr_decay);
  const double denominator = std::sqrt(sum) + options.eps;
  result.value = {old.param - rate * grad / denominator, {sum}};
  result.scale = {std::fabs(old.param) + rate * magnitude / denominator *
                                             (1 + sum_scale / (sum + options.eps * options.eps)),
                  {sum_scale}};
  return result;
}

inline Expected reference(const dsx::StepCall<dsx::Sgd>& call, double step, double grad,
                          const Element& old) {
  const dsx::Sgd::Options& options = call.options;
  const double decay = options.weight_decay * old.param;
  const double early = options.wd_after_momentum ? 0 : decay;
  double update = scaled(call, grad) + early;
  double update_scale = std::fabs(scaled(call, grad)) + std::fabs(early);

  Expected result{};
  if (options.momentum != 0) {
    double buffer = update, buffer_scale = update_scale;
    if (step > 1) {
      buffer = options.momentum * old.states[0] + (1 - options.dampening) * update;
      buffer_scale =
          options.momentum * std::fabs(old.states[0]) + (1 - options.dampening) * update_scale;
    }
    result.value.states[0] = buffer;
    result.scale.states[0] = buffer_scale;
    update = options.nesterov ? update + options.momentum * buffer : buffer;
    update_scale = options.nesterov ? update_scale + options.momentum * buffer_scale : buffer_scale;
  }
  if (options.wd_after_momentum) {
    update += decay;
    update_scale += std::fabs(decay);
  }
  result.value.param = old.param - call.lr.value() * update;
  result.scale.param = std::fabs(old.param) + call.lr.value() * update_scale;
  return result;
}

inline Expected reference(const dsx::StepCall<dsx::Rmsprop>& call, double /*step*/, double grad,
                          const Element& old) {
  const dsx::Rmsprop::Options& options = call.options;
  const auto& [old_square_avg, old_grad_avg, old_buffer] = old.states;
  const double decay = options.weight_decay * old.param;
  const double magnitude = std::fabs(scaled(call, grad)) + std::fabs(decay);
  grad = scaled(call, grad) + decay;

  Expected result{};
  auto& [square_avg, grad_avg, buffer] = result.value.states;
  auto& [square_avg_scale, grad_avg_scale, buffer_scale] = result.scale.states;
  const double alpha = options.alpha;
  square_avg = alpha * old_square_avg + (1 - alpha) * grad * grad;
  square_avg_scale = alpha * old_square_avg + (1 - alpha) * magnitude * magnitude;
  double variance = square_avg, variance_scale = square_avg_scale;
  if (options.centered) {
    grad_avg = alpha * old_grad_avg + (1 - alpha) * grad;
    grad_avg_scale = alpha * std::fabs(old_grad_avg) + (1 - alpha) * magnitude;
    variance = torch_maximum(square_avg - grad_avg * grad_avg, 0x1p-22 * square_avg);
    variance_scale += grad_avg_scale * grad_avg_scale;
  }
  const double denominator = std::sqrt(variance) + options.eps;
  double update = grad / denominator;
  double update_scale =
      magnitude / denominator * (1 + variance_scale / (variance + options.eps * options.eps));
  if (options.momentum != 0) {
    buffer = options.momentum * old_buffer + update;
    buffer_scale = options.momentum * std::fabs(old_buffer) + update_scale;
    update = buffer;
    update_scale = buffer_scale;
  }
  result.value.param = old.param - call.lr.value() * update;
  result.scale.param = std::fabs(old.param) + call.lr.value() * update_scale;
  return result;
}
