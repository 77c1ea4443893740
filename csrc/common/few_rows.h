// What matrix multiplications on few rows have in common: residual + activation(x w^T + bias),
// where w is read once, whatever it is stored as. No torch: plain pointers and numbers.
#pragma once

#include "common/activation.h"
#include "common/rows.h"

namespace dsx {

constexpr int64_t kMostRows = 64;

// A call, but for its weight.
struct FewRows {
  int64_t rows;     // of x and of the results, up to kMostRows
  int64_t columns;  // of the results
  int64_t length;   // of rows of x and of the weight
  bool activated;   // or the sums are the results
  bool gated;       // only if activated: the weight has the rows of gates, then what they gate
  Activation activation;
  Rows x;
  Rows bias;      // one row, with an element for each row of the weight; absent: zeros
  Rows residual;  // absent: zeros
  Rows out;       // written

  DSX_HOST_DEVICE int64_t weight_rows() const { return gated ? 2 * columns : columns; }
};

}  // namespace dsx
