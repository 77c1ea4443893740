// The weight of a linear layer as few bits, in the order that kernels read it. No torch: plain
// pointers and numbers.
//
// A row is padded to whole lines of 128 bytes by codes of 0; all rows lie one after the other. In a
// line, elements are in runs of 16 bytes, each of 4 words, of which word number w has, from its
// lowest bits on:
//
//   int4, nf4: a run of 32     2w  8+2w  16+2w  24+2w   2w+1  9+2w  17+2w  25+2w     4 bits each
//   int8:      a run of 16     2w  8+2w   2w+1  9+2w                                 8 bits each
//
// so that for each n the bits from 4 n (8 n) and from 4 n + 16 (8 n + 16) on have neighbours, as
// the pairs of 16 bits that tensor cores multiply. Codes are signed: of int8 two's complement, of
// int4 the code and 8; of asymmetric formats, 128 or 8 less than they are in formats.h, and of nf4
// as they are there. Scales and offsets lie by groups: [groups][rows, padded to a multiple of 4].
#pragma once

#include <cstdint>

#include "quantization/formats.h"

namespace dsx {

constexpr int64_t kPackedLineBytes = 128, kRunBytes = 16;
constexpr int64_t kScalesMultiple = 4;  // of the rows that scales are padded to

// What is flipped of a code of formats.h to make it signed.
DSX_HOST_DEVICE constexpr uint32_t sign_of_packed(QuantFormat format, bool asymmetric) {
  return format == QuantFormat::int8 && asymmetric ? 0x80 : 0;
}

// What a row is padded with, signed: 0, or the level that is 0.
DSX_HOST_DEVICE constexpr uint32_t packed_padding(QuantFormat format) {
  if (format == QuantFormat::nf4) return 7;
  return format == QuantFormat::int4 ? 8 : 0;
}

// Which element of a run has code number `step` of word number `word`.
DSX_HOST_DEVICE constexpr int element_of_run(int bits, int word, int step) {
  const int half = 16 / bits;
  return 8 * (step % half) + step / half + 2 * word;
}

struct PackedWeight {
  const uint8_t* codes;
  const float* scales;
  const float* offsets;  // null: symmetric
  QuantFormat format;    // int8, int4 or nf4
  int64_t rows, length;
  int64_t group;        // elements, at most length
  int64_t row_bytes;    // whole lines
  int64_t scale_pitch;  // floats from one group to the next, a multiple of 4

  DSX_HOST_DEVICE int64_t groups() const { return group == 0 ? 0 : (length + group - 1) / group; }
};

}  // namespace dsx
