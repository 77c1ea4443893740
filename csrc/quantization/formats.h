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
//   twice the quotient of half of the difference, as the whole of it may be infinite
//
// Groups may have several rows of a matrix too: as many of each of these, one below the other.
//
// Where the largest x is beyond 2^128 - 2^108, that takes its place: a code times a rounded scale
// must not be infinite. A scale is at least 2^-126, so that 1 / s is finite: a group of zeros has
// that one. A group with an element that is not finite has the scale NaN, the offset 0 and bytes of
// 0 for codes: all of it becomes NaN.
//
// Codes of 4 bits lie two in a byte, along the row, which begins with a whole byte:
//   byte i:  bits 0 .. 3  element 2 i        bits 4 .. 7  element 2 i + 1, or 0 behind the end
#pragma once

#include <cstdint>

#include "common/math.h"

namespace dsx {

// In the order of deepspeed_ext/ops/quantization/formats.py.
enum class QuantFormat : int64_t { int8, int4, nf4, fp8_e4m3, fp8_e5m2 };
constexpr int64_t kQuantFormats = 5;

DSX_HOST_DEVICE constexpr int bits_of_code(QuantFormat format) {
  return format == QuantFormat::int4 || format == QuantFormat::nf4 ? 4 : 8;
}

// What the code of the largest element stands for, times the scale.
DSX_HOST_DEVICE constexpr float largest_code(QuantFormat format, bool asymmetric) {
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
constexpr float kMostScaled = 0x1.ffffep127f;

// The levels of NF4: Dettmers, Pagnoni, Holtzman & Zettlemoyer, "QLoRA: Efficient Finetuning of
// Quantized LLMs", 2023, appendix E.
DSX_HOST_DEVICE constexpr float nf4_level(int code) {
  constexpr float levels[] = {-1.0f,         -0.696192801f, -0.525073051f,  -0.394917488f,
                              -0.284441382f, -0.184773430f, -0.0910500363f, 0.0f,
                              0.0795802996f, 0.160930201f,  0.246112302f,   0.337915242f,
                              0.440709829f,  0.562617004f,  0.722956836f,   1.0f};
  return levels[code];
}

}  // namespace dsx
