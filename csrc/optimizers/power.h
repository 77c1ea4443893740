// Powers of decay rates, for bias correction: beta^step.
#pragma once

#include "common/dtype.h"

namespace dsx {

// base^exponent by repeated squaring: the same bits on every device, unlike the library's pow.
DSX_HOST_DEVICE inline double power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

}  // namespace dsx
