// The floats at which a conversion to 16 bits can go wrong, and some of all others.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "common/dtype.h"

// Bits `pattern` of Half (5 exponent bits, bias 15) or BFloat16 (8, 127) by the definition of IEEE
// formats, in double; infinity and NaN read as if they were finite, the next value after the last.
template <class T>
double value_of(uint16_t pattern);

inline double value_of_fields(uint16_t pattern, int fraction_bits, int bias) {
  const int fraction = pattern & ((1 << fraction_bits) - 1);
  const int exponent = (pattern & 0x7fff) >> fraction_bits;
  const int implicit_bit = exponent == 0 ? 0 : 1 << fraction_bits;
  const double magnitude =
      std::ldexp(fraction + implicit_bit, (exponent == 0 ? 1 : exponent) - bias - fraction_bits);
  return (pattern & 0x8000) != 0 ? -magnitude : magnitude;
}

template <>
inline double value_of<dsx::Half>(uint16_t pattern) {
  return value_of_fields(pattern, 10, 15);
}

template <>
inline double value_of<dsx::BFloat16>(uint16_t pattern) {
  return value_of_fields(pattern, 7, 127);
}

// All values of T, all middles between neighbours, and the floats next to each, of both signs.
template <class T>
void append_edges(std::vector<float>& samples) {
  for (uint16_t pattern = 0; pattern <= T::kQuietNan; ++pattern) {
    const double value = value_of<T>(pattern);
    const double middle = (value + value_of<T>(uint16_t(pattern + 1))) / 2;
    for (float edge : {float(value), float(middle)}) {
      for (float near : {std::nextafter(edge, -INFINITY), edge, std::nextafter(edge, INFINITY)}) {
        samples.push_back(near);
        samples.push_back(-near);
      }
    }
  }
}

inline std::vector<float> conversion_samples() {
  std::vector<float> samples;
  append_edges<dsx::Half>(samples);
  append_edges<dsx::BFloat16>(samples);
  for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 8191) {  // NaN of all kinds among them
    samples.push_back(dsx::float_of(uint32_t(bits)));
  }
  for (uint32_t bits : {0x7f800000u, 0x7f800001u, 0x7fbfffffu, 0x7fc00000u, 0x7fffffffu}) {
    samples.push_back(dsx::float_of(bits));
    samples.push_back(dsx::float_of(bits | 0x80000000u));
  }
  return samples;
}
