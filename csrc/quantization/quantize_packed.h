// Floats to codes of few bits in the order of packed_weight.h, in one pass. No torch: plain
// pointers and numbers.
#pragma once

#include "quantization/packed_weight.h"
#include "quantization/quantize.h"

namespace dsx {

// What is told of each row: the largest |x - value| in parts of the scale of its group, and the sum
// of (x - value)^2. A value is what a code stands for, not rounded. NaN if a group is not finite.
constexpr int64_t kRowErrors = 2;

// Groups are of one row, formats int8, int4 or nf4. Scales and offsets are written.
struct QuantizePacked : Groups {
  Rows x;
  uint8_t* codes;       // [rows][row_bytes], written
  int64_t row_bytes;    // whole lines
  int64_t scale_pitch;  // floats from one group to the next
  double* errors;       // [rows][kRowErrors], written; null: not wanted

  DSX_HOST_DEVICE int64_t padded_length() const { return row_bytes * 8 / bits_of_code(format); }
  DSX_HOST_DEVICE int64_t padded_rows() const {
    return ceil_div(rows, kScalesMultiple) * kScalesMultiple;
  }
  DSX_HOST_DEVICE int64_t place_of_scale(int64_t column, int64_t row) const {
    return column * scale_pitch + row;
  }
};

// Rows [begin, end), and with the last one what scales are padded with. Never throws.
void quantize_packed_cpu(Isa isa, const QuantizePacked& call, int64_t begin, int64_t end);

// Queues all of it on the stream (cudaStream_t). Throws std::runtime_error.
void quantize_packed_cuda(const QuantizePacked& call, void* stream);

}  // namespace dsx
