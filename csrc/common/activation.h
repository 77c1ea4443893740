// The functions between the matrices of a feed-forward block. No torch: plain numbers.
#pragma once

#include <cstdint>

namespace dsx {

// In the order of deepspeed_ext/ops/_activations.py.
enum class Activation : int64_t { gelu, gelu_tanh, gelu_quick, relu, silu };
constexpr int64_t kActivations = 5;

}  // namespace dsx
