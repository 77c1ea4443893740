// What products of rows with the weights of their experts have in common, for few rows: the weight
// of each expert that has rows is read once. No torch: plain pointers and numbers.
#pragma once

#include "linear/few_rows.h"

namespace dsx {

constexpr int64_t kMostGroupedRows = 512;  // of all experts: 64 tokens of 8 choices

// A call, but for its weight: activation(x w^T + bias) for each row, w and bias being its expert's.
struct GroupedRows {
  int64_t rows;     // of the results, up to kMostGroupedRows
  int64_t columns;  // of the results
  int64_t length;   // of rows of x and of the weight
  int64_t experts;  // 1 or more

  // Where the rows of each expert end: [experts]. Those from the last one on are written as zeros.
  // On the CPU they do not fall, and are no more than the rows; on CUDA nobody has looked.
  const int32_t* offsets;
  // [tokens, k] which row each choice of a token is, or -1; null: row i is that of x. On the CPU
  // all rows before the last offset are one choice each; on CUDA one that is no row is dropped.
  const int64_t* slots;
  int64_t tokens, k;  // without slots: rows and 1

  bool activated;  // or the sums are the results
  bool gated;      // only if activated: a weight has the rows of gates, then what they gate
  Activation activation;
  Rows x;     // of tokens
  Rows bias;  // a row for each expert, with an element for each row of its weight; absent: zeros
  Rows out;   // written; one after the other, with the dtype of x

  DSX_HOST_DEVICE int64_t weight_rows() const { return gated ? 2 * columns : columns; }  // of each
};

// On the CPU: some rows of one expert, up to kMostRows.
struct RowsOfExpert {
  int64_t expert;
  int64_t first, rows;  // of the results
  const int64_t* of_x;  // [rows] which row of x each one is
};

// A call as a skinny GEMM, but for its rows, bias, results and weight.
inline FewRows form_of(const GroupedRows& call) {
  FewRows few = {};
  few.columns = call.columns;
  few.length = call.length;
  few.activated = call.activated;
  few.gated = call.gated;
  few.activation = call.activation;
  few.x = call.x;
  return few;
}

// Some rows of one expert as a skinny GEMM, which lacks its weight.
template <class Call>
Call few_rows_of(const GroupedRows& call, const RowsOfExpert& part) {
  Call few = {};
  static_cast<FewRows&>(few) = form_of(call);
  few.rows = part.rows;
  few.x_rows = part.of_x;
  if (call.bias.is_present()) {
    few.bias = {call.bias.row<Any>(part.expert).address, 0, call.bias.dtype};
  }
  few.out = {call.out.row<Any>(part.first).address, call.out.pitch, call.out.dtype};
  return few;
}

}  // namespace dsx
