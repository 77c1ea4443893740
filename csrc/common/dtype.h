// 16-bit storage types and their conversions to and from float; arithmetic is always done in float.
// Widening is exact. Narrowing rounds to nearest, ties to even; every NaN becomes kQuietNan.
#pragma once

#include <cstdint>
#include <cstring>

// A formula is DSX_INLINE: in line in every loop, though that is more than compilers reckon worth
// it where a file has many; a call of a function of vectors takes as long as many of these.
#ifdef __CUDACC__
#define DSX_HOST_DEVICE __host__ __device__
#define DSX_INLINE __host__ __device__ inline
#define DSX_INLINED
#else
#define DSX_HOST_DEVICE
#define DSX_INLINE __attribute__((always_inline)) inline
#define DSX_INLINED __attribute__((always_inline))  // of a lambda, for the same reason
#endif

namespace dsx {

struct Half {  // IEEE binary16: 1 sign bit, 5 exponent bits, 10 fraction bits
  static constexpr uint16_t kQuietNan = 0x7e00;
  uint16_t bits;
};

struct BFloat16 {  // the upper half of a float: 1 sign bit, 8 exponent bits, 7 fraction bits
  static constexpr uint16_t kQuietNan = 0x7fc0;
  uint16_t bits;
};

// How the elements of a tensor are stored: float, BFloat16, Half.
enum class Dtype : int8_t { float32, bfloat16, float16 };

DSX_HOST_DEVICE constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

struct Any {};  // stands for a storage type that is known at run time only, by its Dtype

DSX_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

DSX_HOST_DEVICE inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

DSX_HOST_DEVICE inline float to_float(float value) { return value; }

DSX_HOST_DEVICE inline float to_float(BFloat16 value) {
  return float_of(uint32_t(value.bits) << 16);
}

DSX_HOST_DEVICE inline float to_float(Half value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  if (magnitude < 0x0400) {  // zero or subnormal: a count of 2^-24
    return float_of(sign | bits_of(float(magnitude) * 0x1p-24f));
  }
  const bool finite = magnitude < 0x7c00;
  const uint32_t exponent_shift = finite ? 127 - 15 : 255 - 31;  // biases, or exponents of infinity
  return float_of(sign | ((magnitude << 13) + (exponent_shift << 23)));
}

template <class T>
T from_float(float value);

template <>
DSX_HOST_DEVICE inline float from_float<float>(float value) {
  return value;
}

template <>
DSX_HOST_DEVICE inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {BFloat16::kQuietNan};
  const uint32_t odd = (bits >> 16) & 1;
  return {uint16_t((bits + 0x7fff + odd) >> 16)};
}

template <>
DSX_HOST_DEVICE inline Half from_float<Half>(float value) {
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000;
  const uint32_t magnitude = bits_of(value) & 0x7fffffff;
  if (magnitude > 0x7f800000) return {Half::kQuietNan};
  if (magnitude >= bits_of(65520.0f)) return {uint16_t(sign | 0x7c00)};  // rounds to infinity
  if (magnitude < bits_of(0x1p-14f)) {
    // Subnormal. The last bit of 0.5f is worth 2^-24, as in a subnormal Half: the addition rounds.
    const float rounded = float_of(magnitude) + 0.5f;
    return {uint16_t(sign | (bits_of(rounded) - bits_of(0.5f)))};
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  const uint32_t exponent_shift = uint32_t(127 - 15) << 23;
  return {uint16_t(sign | ((magnitude - exponent_shift + 0xfff + odd) >> 13))};
}

}  // namespace dsx
