// Floats to codes of few bits and back; formats.h draws the formats. No torch: plain pointers and
// numbers.
#pragma once

#include "common/noise.h"
#include "common/rows.h"
#include "common/simd/isa.h"
#include "quantization/formats.h"

namespace dsx {

// What a group is, and where its numbers are: [ceil(rows / group_rows)][groups()].
struct Groups {
  int64_t rows, length;
  int64_t group;       // elements along a row, positive
  int64_t group_rows;  // rows, positive
  QuantFormat format;
  bool asymmetric;
  float* scales;
  float* offsets;  // null: symmetric

  int64_t columns() const { return ceil_div(length, group); }  // groups side by side
  int64_t bands() const { return ceil_div(rows, group_rows); }  // one below the other
};

// One byte for two codes of 4 bits: each row begins with a byte of its own.
inline int64_t bytes_of_row(QuantFormat format, int64_t length) {
  return bits_of_code(format) == 4 ? ceil_div(length, 2) : length;
}

struct Quantize : Groups {
  Noise noise;     // on: rounding is stochastic; of integer formats only
  Rows x;
  uint8_t* codes;  // [rows][bytes_of_row], written; null: not wanted
  Rows out;        // written: what the codes stand for; absent: not wanted
};

struct Dequantize : Groups {
  const uint8_t* codes;
  Rows out;  // written
};

}  // namespace dsx
