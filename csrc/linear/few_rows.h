// What skinny GEMMs, whose x has few rows, have in common: residual + activation(x w^T + bias),
// where w is read once, whatever it is stored as. No torch: plain pointers and numbers.
#pragma once

#include "common/activation.h"
#include "common/rows.h"

namespace dsx {

constexpr int64_t kMostRows = 64;
constexpr int64_t kSquared = 8;  // neighbours in a row, whose squares are added up first

// A call, but for its weight.
struct FewRows {
  int64_t rows;     // of x and of the results, up to kMostRows
  int64_t columns;  // of the results
  int64_t length;   // of rows of x and of the weight
  bool activated;   // or the sums are the results
  bool gated;       // only if activated: the weight has the rows of gates, then what they gate
  Activation activation;
  Rows x;
  Rows bias;              // one row, with an element for each row of the weight; absent: zeros
  Rows residual;          // absent: zeros
  Rows out;               // written
  const int64_t* x_rows;  // on the CPU: which row of x each one is; null: as they lie

  // An RMS norm before the layer, of which x has all but the division: what is to be normalized
  // times the norm's weight. The sums take that division.
  Rows squares;  // float32, [rows, length / kSquared]: sums of squares; absent: no norm before
  float eps;
  float* inverses;  // on CUDA: [rows] what the sums take, written first; null: it is found at once
  // An RMS norm after the layer, as far as each kSquared columns can do it alone. Not if gated, and
  // with a multiple of kSquared columns.
  Rows norm_weight;     // one row, of `columns`; absent: no norm after
  float weight_offset;  // added to it; none: -0
  Rows scaled;          // out times both, written
  Rows out_squares;     // float32, [rows, columns / kSquared]: sums of squares of out, written

  template <class T>
  Pointer<T> row_of_x(int64_t i) const {
    return x.row<T>(x_rows == nullptr ? i : x_rows[i]);
  }
  DSX_HOST_DEVICE int64_t weight_rows() const { return gated ? 2 * columns : columns; }
};

}  // namespace dsx
