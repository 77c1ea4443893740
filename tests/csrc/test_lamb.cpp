// Tests both passes of LAMB.
#include "optimizers/lamb.h"
#include "two_passes.h"

using Measure = dsx::LambMoments;
using Update = dsx::LambApply;

constexpr int kStatesOfCalls[] = {2};
constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-3, kDecay = 0.1;

Measure::Options measure_options(bool variant) {
  return {kBeta1, kBeta2, kEps, kDecay, variant, true};
}

Update::Options update_options(bool variant, int /*states*/) {
  return {kBeta1, kBeta2, kEps, kDecay, variant, true};
}

Expected expected_of(const Element& e) {
  const double exp_avg = e.states[0] / (1 - std::pow(kBeta1, e.step));
  const double exp_avg_sq = e.states[1] / (1 - std::pow(kBeta2, e.step));
  const double update = exp_avg / (std::sqrt(exp_avg_sq) + kEps) + kDecay * e.param;
  return {.param = e.param - e.rate * update,
          .states = {kBeta1 * e.old_states[0] + (1 - kBeta1) * e.grad,
                     kBeta2 * e.old_states[1] + (1 - kBeta2) * e.grad * e.grad},
          .measured = {e.param, update}};
}

#include "two_passes.inl"
