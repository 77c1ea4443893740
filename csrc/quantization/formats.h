// How few bits stand for floats. No torch: plain numbers.
//
//   a row of x, cut into groups from its start; the last one may be shorter
//   | g0                  | g1                  | g2        |
//   a group has a scale s, and if it is asymmetric an offset o, both float32; an element has a code
//
//   format    code c                      element          scale of a group
//   int8      -127 .. 127 as int8         c s              largest |x| / 127
//   int4      -7 .. 7, stored as c + 8    c s              largest |x| / 7
//   nf4       0 .. 15                     level[c] s       largest |x|
//   fp8_e4m3  an 8-bit float              c s              largest |x| / 448
//   fp8_e5m2  an 8-bit float              c s              largest |x| / 57344
//   asymmetric, with offset o = least x:
//   int8      0 .. 255 as uint8           c s + o          (largest x - least x) / 255
//   int4      0 .. 15                     c s + o          (largest x - least x) / 15
//
// A scale is at least 2^-126, so that 1 / s is finite: a group of zeros has that one. A group with
// an element that is not finite has the scale NaN, the offset 0 and codes of 0: all of it becomes
// NaN.
//
// Codes of 4 bits lie two in a byte, along the row, which begins with a whole byte:
//   byte i:  bits 0 .. 3  element 2 i        bits 4 .. 7  element 2 i + 1, or 0 behind the end
#pragma once

#include <cstdint>

namespace dsx {

// In the order of deepspeed_ext/ops/quantization/formats.py.
enum class QuantFormat : int64_t { int8, int4, nf4, fp8_e4m3, fp8_e5m2 };
constexpr int64_t kQuantFormats = 5;

constexpr int bits_of_code(QuantFormat format) {
  return format == QuantFormat::int4 || format == QuantFormat::nf4 ? 4 : 8;
}

// What the code of the largest element stands for, times the scale.
constexpr float largest_code(QuantFormat format, bool asymmetric) {
  switch (format) {
    case QuantFormat::int8: return asymmetric ? 255.0f : 127.0f;
    case QuantFormat::int4: return asymmetric ? 15.0f : 7.0f;
    case QuantFormat::nf4: return 1.0f;
    case QuantFormat::fp8_e4m3: return 448.0f;
    case QuantFormat::fp8_e5m2: return 57344.0f;
  }
  return 1.0f;
}

constexpr float kLeastScale = 0x1p-126f;

}  // namespace dsx
