// activation(gate) * up, element by element, and its gradients. No torch: plain numbers.
#pragma once

#include "elementwise/elementwise.h"

namespace dsx {

struct GatedActivation {  // in: gate, up; out: activation(gate) * up
  static constexpr const char* kOp = "gated_activation";
  static constexpr int kIn = 2, kOut = 1;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return false; }
  Activation activation;
};

struct GatedActivationBackward {  // in: gate, up, grad_out; out: grad_gate, grad_up
  static constexpr const char* kOp = "gated_activation_backward";
  static constexpr int kIn = 3, kOut = 2;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return false; }
  Activation activation;
};

#define DSX_RULES(each) each(GatedActivation) each(GatedActivationBackward)

}  // namespace dsx
