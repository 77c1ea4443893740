// residual + activation(x w^T + bias) for few rows of x and a weight of few bits, reading it once.
// No torch: plain pointers and numbers.
#pragma once

#include "common/few_rows.h"
#include "common/simd/isa.h"
#include "quantization/packed_weight.h"

namespace dsx {

struct QuantizedLinear : FewRows {
  PackedWeight weight;  // gated: behind the rows of gates, those of what they gate
};

// An element of the weight is c s, or c s + o. A result is the sum over groups, from the first one
// on, of s times the sum of c x, to which o times the sum of x is added; in float32, in an order
// that depends on length and group alone. So a row has the same bits alone and beside others.

}  // namespace dsx
