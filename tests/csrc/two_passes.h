// One element of an optimizer of two passes, in double: what two_passes.inl compares with.
#pragma once

#include <cmath>
#include <vector>

#include "expect.h"
#include "optimizers/step.h"

struct Element {
  double step, rate;          // of its tensor; the rate has the coefficient in it
  double param, grad;         // before; the gradient as the formula takes it
  double old_states[2] = {};  // before
  double states[2] = {};      // as they have been stored
};

struct Expected {
  double param;
  double states[2];
  double measured[2];  // whose squares are added up over a tensor
};
