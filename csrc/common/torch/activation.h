// Activations as ops are told of them.
#pragma once

#include "common/activation.h"
#include "common/torch/arguments.h"
#include "common/torch/checks.h"

namespace dsx {

inline Activation activation_of(const char* op, int64_t number) {
  check(number >= 0 && number < kActivations, op, ": activation is ", number,
        ", expected a number from 0 to ", kActivations - 1);
  return Activation(number);
}

}  // namespace dsx
