// dropout(x + bias) + residual, and dropout(activation(x + bias)), element by element, and their
// gradients. No torch: plain numbers.
#pragma once

#include "elementwise/elementwise.h"

namespace dsx {

struct BiasDropoutResidual {  // in: x, biased, and residual; out: dropout(x) + residual
  static constexpr const char* kOp = "bias_dropout_residual";
  static constexpr int kIn = 3, kOut = 1, kKept = 1;
  DSX_HOST_DEVICE static constexpr bool is_biased(int i) { return i == 0; }
  DSX_HOST_DEVICE static constexpr bool is_optional(int i) { return i == 2; }
  Dropout dropout;
};

struct BiasDropoutResidualBackward {  // in: grad_out; out: grad_x, its sum that of the bias
  static constexpr const char* kOp = "bias_dropout_residual_backward";
  static constexpr int kIn = 2, kOut = 1, kKept = 1;
  static constexpr Sums kSums = Sums::beside;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return false; }
  Dropout dropout;
};

struct DropoutActivation {  // in: x, biased; out: dropout(activation(x))
  static constexpr const char* kOp = "dropout_activation";
  static constexpr int kIn = 2, kOut = 1, kKept = 1;
  DSX_HOST_DEVICE static constexpr bool is_biased(int i) { return i == 0; }
  Activation activation;
  Dropout dropout;
};

struct DropoutActivationBackward {  // in: grad_out and x, biased; out: grad_x, its sum likewise
  static constexpr const char* kOp = "dropout_activation_backward";
  static constexpr int kIn = 3, kOut = 1, kKept = 2;
  static constexpr Sums kSums = Sums::beside;
  DSX_HOST_DEVICE static constexpr bool is_biased(int i) { return i == 1; }
  Activation activation;
  Dropout dropout;
};

#define DSX_RULES(each)                                                               \
  each(BiasDropoutResidual) each(BiasDropoutResidualBackward) each(DropoutActivation) \
      each(DropoutActivationBackward)

}  // namespace dsx
