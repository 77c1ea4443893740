// Tests both passes of LARS, with and without momentum.
#include "optimizers/lars.h"
#include "two_passes.h"

using Measure = dsx::LarsNorms;
using Update = dsx::LarsApply;

constexpr int kStatesOfCalls[] = {0, 1};
constexpr double kMomentum = 0.9, kDecay = 0.1;

Measure::Options measure_options(bool /*variant*/) { return {}; }

Update::Options update_options(bool variant, int states) {
  return {.momentum = states > 0 ? kMomentum : 0, .weight_decay = variant ? 0 : kDecay};
}

Expected expected_of(const Element& e) {
  const double delta = e.rate * (e.grad + kDecay * e.param) + kMomentum * e.old_states[0];
  return {.param = e.param - delta, .states = {delta}, .measured = {e.param, e.grad}};
}

#include "two_passes.inl"
