// Floats to codes of few bits and back; formats.h draws the formats. No torch: plain pointers and
// numbers.
#pragma once

#include <type_traits>

#include "common/noise.h"
#include "common/rows.h"
#include "common/simd/isa.h"
#include "quantization/formats.h"

namespace dsx {

// How rows are cut into groups, and where the numbers of these are: [bands()][columns()].
struct Groups {
  int64_t rows, length;
  int64_t group;       // elements along a row, positive
  int64_t group_rows;  // rows, positive
  QuantFormat format;
  bool asymmetric;
  float* scales;   // null: not wanted, of what is measured by whoever rounds it
  float* offsets;  // null: symmetric, or as scales

  // Groups side by side, and one below the other.
  DSX_HOST_DEVICE int64_t columns() const { return ceil_div(length, group); }
  DSX_HOST_DEVICE int64_t bands() const { return ceil_div(rows, group_rows); }
};

// Codes of 4 bits lie two in a byte, and each row begins with a byte of its own.
DSX_HOST_DEVICE inline int64_t bytes_of_row(QuantFormat format, int64_t length) {
  return bits_of_code(format) == 4 ? ceil_div(length, 2) : length;
}

struct Quantize : Groups {
  Noise noise;  // on: integers are rounded stochastically
  Rows x;
  uint8_t* codes;  // [rows][bytes_of_row], written; null: not wanted
  Rows out;        // in their place what the codes stand for, written; may be where x is
};

struct Dequantize : Groups {
  const uint8_t* codes;
  Rows out;  // written
};

// What a thread does is a number of tasks, each a part of a row. Tasks of so many elements begin
// with a whole byte and, if they are to be measured too, with a group, of which they have all.
constexpr int64_t kMostGroups = 4096;  // that a task has part in

struct QuantizeTasks {
  int64_t length;  // elements, kMostGroups or a little more, of large groups one or two of these

  QuantizeTasks(const Groups& call, bool measured);
  int64_t of_row(const Groups& call) const { return ceil_div(call.length, length); }
  int64_t count(const Groups& call) const { return call.rows * of_row(call); }
};

// Groups of one row up to this many elements are measured by whoever rounds them, from the cache.
constexpr int64_t kMostAtOnce = 32768;

// Others are measured before, in parts of so many elements along a row or, of shorter ones, rows.
constexpr int64_t kPart = 65536;

struct Parts {
  int64_t columns, rows;     // elements and rows of a part
  int64_t across, of_group;  // parts side by side, and in all

  explicit Parts(const Groups& call);
};

// What a group or a part of it is measured for, as integers that do not depend on an order.
struct Largest {
  uint32_t magnitude_or_order = 0;
  uint32_t flipped = 0;  // the largest complement of an order
};

// Parts [begin, end), those of a group one after the other. Never throws.
void measure_parts_cpu(Isa isa, const Quantize& call, int64_t begin, int64_t end, Largest* found);

// Scales and offsets of all groups from what their parts were measured for. Never throws.
void finish_scales_cpu(Isa isa, const Quantize& call, const Largest* found);

// Tasks [begin, end). Never throws.
void quantize_cpu(Isa isa, const Quantize& call, bool measured, int64_t begin, int64_t end);
void dequantize_cpu(Isa isa, const Dequantize& call, int64_t begin, int64_t end);

// Queue the same on the stream (cudaStream_t). They throw std::runtime_error. Scales must be there
// if groups are measured before they are rounded: those that are not in the registers of a block.
bool quantize_cuda_measures_before(const Quantize& call);
void quantize_cuda(const Quantize& call, void* stream);
void dequantize_cuda(const Dequantize& call, void* stream);

}  // namespace dsx
