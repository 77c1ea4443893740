// Several floats in the registers of a thread, for formulas: a branch on a constant is taken once
// for all of them, and their instructions overlap.
#pragma once

#include "common/math.h"

namespace dsx::cuda {

template <int kCount>
struct Floats {
  float lanes[kCount];

  Floats() = default;
  __device__ Floats(float value) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) lanes[i] = value;
  }
};

template <int kCount>
struct Mask {
  bool lanes[kCount];
};

#define DSX_FOR_EACH_LANE(Result, ...)                                              \
  Result<kCount> result;                                                            \
  _Pragma("unroll") for (int i = 0; i < kCount; ++i) result.lanes[i] = __VA_ARGS__; \
  return result
#define DSX_BINARY(Argument, Result, name, ...)                                                 \
  template <int kCount>                                                                         \
  __device__ inline Result<kCount> name(const Argument<kCount>& a, const Argument<kCount>& b) { \
    DSX_FOR_EACH_LANE(Result, __VA_ARGS__);                                                     \
  }
#define DSX_UNARY(Type, name, ...)                             \
  template <int kCount>                                        \
  __device__ inline Type<kCount> name(const Type<kCount>& a) { \
    DSX_FOR_EACH_LANE(Type, __VA_ARGS__);                      \
  }

DSX_BINARY(Floats, Floats, operator+, a.lanes[i] + b.lanes[i])
DSX_BINARY(Floats, Floats, operator-, a.lanes[i] - b.lanes[i])
DSX_BINARY(Floats, Floats, operator*, a.lanes[i] * b.lanes[i])
DSX_BINARY(Floats, Floats, min, dsx::min(a.lanes[i], b.lanes[i]))
DSX_BINARY(Floats, Floats, max, dsx::max(a.lanes[i], b.lanes[i]))
DSX_UNARY(Floats, operator-, -a.lanes[i])
DSX_UNARY(Floats, abs, ::fabsf(a.lanes[i]))
DSX_UNARY(Floats, rsqrt, dsx::rsqrt(a.lanes[i]))

// CUDA's own, for ops that do not promise the bits of the CPU: exp is off by 2 units in the last
// place at most, sigmoid by 5; it is 0 instead of what is below 2^-126.
DSX_UNARY(Floats, exp, ::expf(a.lanes[i]))
DSX_UNARY(Floats, sigmoid, ::__fdividef(1.0f, 1.0f + ::expf(-a.lanes[i])))

DSX_BINARY(Floats, Mask, operator<, a.lanes[i] < b.lanes[i])
DSX_BINARY(Floats, Mask, operator<=, a.lanes[i] <= b.lanes[i])
DSX_BINARY(Floats, Mask, operator>, a.lanes[i] > b.lanes[i])
DSX_BINARY(Floats, Mask, operator>=, a.lanes[i] >= b.lanes[i])
DSX_BINARY(Floats, Mask, operator==, a.lanes[i] == b.lanes[i])
DSX_BINARY(Floats, Mask, operator!=, a.lanes[i] != b.lanes[i])
DSX_BINARY(Mask, Mask, operator&, a.lanes[i] && b.lanes[i])
DSX_BINARY(Mask, Mask, operator|, a.lanes[i] || b.lanes[i])
DSX_UNARY(Mask, operator!, !a.lanes[i])

template <int kCount>
__device__ inline Floats<kCount> select(const Mask<kCount>& mask, const Floats<kCount>& a,
                                        const Floats<kCount>& b) {
  DSX_FOR_EACH_LANE(Floats, mask.lanes[i] ? a.lanes[i] : b.lanes[i]);
}

// Division and square root have a short way for numbers of ordinary size and a long one for all
// others, which the compiler chooses for each number by a branch. Here one test decides for all
// lanes: the steps of the short way are those that the compiler takes (an approximation, improved
// by exact remainders), so the bits are too.

template <int kCount>
__device__ inline Floats<kCount> sqrt(const Floats<kCount>& a) {
  constexpr uint32_t kLeast = 0x10000000, kMost = 0x7f000000;  // bits of 2^-95 and 2^127
  uint32_t furthest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    furthest = __viaddmax_u32(dsx::bits_of(a.lanes[i]), 0u - kLeast, furthest);
  }
  if (furthest > kMost - kLeast) [[unlikely]] {
    DSX_FOR_EACH_LANE(Floats, ::sqrtf(a.lanes[i]));
  }
  Floats<kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float inverse;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(a.lanes[i]));
    const float root = __fmul_rn(a.lanes[i], inverse);
    const float rest = __fmaf_rn(-root, root, a.lanes[i]);
    result.lanes[i] = __fmaf_rn(rest, __fmul_rn(0.5f, inverse), root);
  }
  return result;
}

template <int kCount>
__device__ inline Floats<kCount> operator/(const Floats<kCount>& a, const Floats<kCount>& b) {
  // Bits, without the sign and so doubled, of the magnitudes for which no step leaves the normal
  // numbers: 2^-90 to 2^60 for a, 2^-60 to 2^30 for b.
  constexpr uint32_t kLeastA = (127u - 90) << 24, kMostA = (127u + 60) << 24;
  constexpr uint32_t kLeastB = (127u - 60) << 24, kMostB = (127u + 30) << 24;
  uint32_t furthest_a = 0, furthest_b = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    furthest_a = __viaddmax_u32(dsx::bits_of(a.lanes[i]) << 1, 0u - kLeastA, furthest_a);
    furthest_b = __viaddmax_u32(dsx::bits_of(b.lanes[i]) << 1, 0u - kLeastB, furthest_b);
  }
  if (furthest_a > kMostA - kLeastA || furthest_b > kMostB - kLeastB) [[unlikely]] {
    DSX_FOR_EACH_LANE(Floats, a.lanes[i] / b.lanes[i]);
  }
  Floats<kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b.lanes[i]));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-b.lanes[i], inverse, 1.0f), inverse);
    float quotient = __fmul_rn(a.lanes[i], inverse);
    quotient = __fmaf_rn(__fmaf_rn(-b.lanes[i], quotient, a.lanes[i]), inverse, quotient);
    quotient = __fmaf_rn(__fmaf_rn(-b.lanes[i], quotient, a.lanes[i]), inverse, quotient);
    result.lanes[i] = quotient;
  }
  return result;
}

#undef DSX_UNARY
#undef DSX_BINARY
#undef DSX_FOR_EACH_LANE

}  // namespace dsx::cuda
