// activation(x + bias), element by element, and its gradients. No torch: plain numbers.
#pragma once

#include "elementwise/elementwise.h"

namespace dsx {

struct BiasActivation {  // in: x, biased; out: activation(x)
  static constexpr const char* kOp = "bias_activation";
  static constexpr int kIn = 1, kOut = 1;
  static constexpr bool kIsValue = true;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return true; }
  Activation activation;
};

struct BiasActivationBackward {  // in: grad_out, x, biased; out: grad_x, its sum that of the bias
  static constexpr const char* kOp = "bias_activation_backward";
  static constexpr int kIn = 2, kOut = 1;
  static constexpr Sums kSums = Sums::beside;
  DSX_HOST_DEVICE static constexpr bool is_biased(int i) { return i == 1; }
  Activation activation;
};

#define DSX_RULES(each) each(BiasActivation) each(BiasActivationBackward)

}  // namespace dsx
