// What the ops that cap scores take for a cap.
#pragma once

#include "common/torch/checks.h"

namespace dsx {

// 0 is none. Of less than 1e-30, scores over the cap would be beyond floats.
inline void check_soft_cap(const char* op, double soft_cap) {
  const float cap = finite_float(op, "softcap", soft_cap);
  check(soft_cap == 0 || cap > 1e-30f, op, ": softcap is ", soft_cap,
        ", expected 0, or a number over 1e-30");
}

}  // namespace dsx
