// x + bias, or (x + bias) + (other + other_bias), element by element, and the gradients of biases.
// No torch: plain numbers.
#pragma once

#include "elementwise/elementwise.h"

namespace dsx {

struct NhwcBiasAdd {  // in: x and other, biased; out: their sum
  static constexpr const char* kOp = "nhwc_bias_add";
  static constexpr int kIn = 2, kOut = 1;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return true; }
};

struct NhwcBiasAddAlone {  // in: x, biased; out: that. Its kernel has more blocks at a time
  static constexpr const char* kOp = NhwcBiasAdd::kOp;
  static constexpr int kIn = 1, kOut = 1;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return true; }
};

struct NhwcBiasAddBackward {  // in: grad_out; out: the same, of which only the sum is wanted
  static constexpr const char* kOp = "nhwc_bias_add_backward";
  static constexpr int kIn = 1, kOut = 1;
  static constexpr Sums kSums = Sums::alone;
  DSX_HOST_DEVICE static constexpr bool is_biased(int) { return false; }
};

#define DSX_RULES(each) each(NhwcBiasAdd) each(NhwcBiasAddAlone) each(NhwcBiasAddBackward)

}  // namespace dsx
