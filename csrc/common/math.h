// Functions of floats whose result C++, the vector instructions and CUDA define differently, fixed
// once: for formulas in CUDA and for the scalar ISA. Only the payload of a NaN is left open.
#pragma once

#include <cmath>

#include "common/dtype.h"

namespace dsx {

// The larger one; NaN if either is NaN, as torch.maximum. Of two zeros, b.
DSX_HOST_DEVICE inline float max(float a, float b) { return a > b || a != a ? a : b; }

// The smaller one; NaN if either is NaN, as torch.minimum. Of two zeros, b.
DSX_HOST_DEVICE inline float min(float a, float b) { return a < b || a != a ? a : b; }

// Within dsx these hide the min and max of CUDA: integers must not silently become floats.
template <class T>
void max(T a, T b) = delete;
template <class T>
void min(T a, T b) = delete;

// Of unsigned integers, which the storage formats work on.
DSX_HOST_DEVICE inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
DSX_HOST_DEVICE inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
template <int bits>
DSX_HOST_DEVICE inline uint32_t shift_left(uint32_t a) {
  return a << bits;
}
template <int bits>
DSX_HOST_DEVICE inline uint32_t shift_right(uint32_t a) {
  return a >> bits;
}

DSX_HOST_DEVICE inline uint32_t lower_16_bits(uint32_t a) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, 0, 0x4410);  // opaque: what follows may then shift and add in one
#else
  return a & 0xffff;
#endif
}
DSX_HOST_DEVICE inline uint32_t upper_16_bits(uint32_t a) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, 0, 0x4432);
#else
  return a >> 16;
#endif
}

// The same in bits 8 to 23.
DSX_HOST_DEVICE inline uint32_t lower_half_to_middle(uint32_t a) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, 0, 0x4104);
#else
  return (a & 0xffff) << 8;
#endif
}
DSX_HOST_DEVICE inline uint32_t upper_half_to_middle(uint32_t a) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, 0, 0x4324);
#else
  return a >> 16 << 8;
#endif
}

// a / b rounded up, of sizes: a is not negative, b is positive.
DSX_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// a / b, of which neither is negative; most are small, and 64 bits take CUDA 4 times as long.
DSX_HOST_DEVICE inline int64_t quotient(int64_t a, int64_t b) {
  return (a | b) >> 32 == 0 ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

// Each bit of a where the mask has a 1, else of b.
DSX_HOST_DEVICE inline uint32_t blend_bits(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t result;  // one instruction, of which the compiler makes two
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
#else
  return (a & mask) | (b & ~mask);
#endif
}

// a where the mask is true, else b. Masks come from comparisons and combine with & | and !.
DSX_HOST_DEVICE inline float select(bool mask, float a, float b) { return mask ? a : b; }

// a * scale + b where the product is exact, so that it makes no difference that CUDA rounds once.
DSX_HOST_DEVICE inline float scale_and_add(float a, float scale, float b) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, scale, b);
#else
  return a * scale + b;
#endif
}

DSX_HOST_DEVICE inline float abs(float a) { return ::fabsf(a); }

// a * b + c, rounded once.
DSX_HOST_DEVICE inline float multiply_add(float a, float b, float c) { return ::fmaf(a, b, c); }

// The nearest integer; the even one of two.
DSX_HOST_DEVICE inline float round_even(float a) { return ::rintf(a); }

// 1 / sqrt(a) by two operations that round correctly: off by at most 1.5 x 2^-24 of it.
DSX_HOST_DEVICE inline float rsqrt(float a) { return 1.0f / ::sqrtf(a); }

}  // namespace dsx
