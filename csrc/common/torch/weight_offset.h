// What the ops that normalize add to a weight.
#pragma once

#include "common/torch/checks.h"

namespace dsx {

// As kernels add it to each weight. None is -0: a weight of -0 stays that.
inline float finite_weight_offset(const char* op, double weight_offset) {
  const float offset = finite_float(op, "weight_offset", weight_offset);
  return offset == 0 ? -0.0f : offset;
}

}  // namespace dsx
