// A number of an op's options that may live on the device, so that it can change from one replay of
// a CUDA graph to the next without a word from the host.
#pragma once

#include "common/dtype.h"

namespace dsx {

struct Scalar {
  double constant = 0;                   // the value, if both pointers are null
  const float* float_address = nullptr;  // else where the value lies
  const double* double_address = nullptr;

  DSX_HOST_DEVICE double value() const {
    if (float_address != nullptr) return *float_address;
    return double_address != nullptr ? *double_address : constant;
  }
};

}  // namespace dsx
