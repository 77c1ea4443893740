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

// One instruction each, which makes 0 of results below 2^-126: off by 2 units in the last place at
// most, as a power of 2.
__device__ inline float fast_exp2(float a) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
__device__ inline float fast_reciprocal(float a) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
__device__ inline float fast_exp_of_negative(float a) { return fast_exp2(a * 1.44269504f); }

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
DSX_BINARY(Floats, Floats, operator/, a.lanes[i] / b.lanes[i])
DSX_BINARY(Floats, Floats, min, dsx::min(a.lanes[i], b.lanes[i]))
DSX_BINARY(Floats, Floats, max, dsx::max(a.lanes[i], b.lanes[i]))
DSX_UNARY(Floats, operator-, -a.lanes[i])
DSX_UNARY(Floats, abs, ::fabsf(a.lanes[i]))
DSX_UNARY(Floats, sqrt, ::sqrtf(a.lanes[i]))

// CUDA's own, for ops that do not promise the bits of the CPU: exp is off by 2 units in the last
// place at most, log by 1.5, sigmoid by 5, rsqrt not at all; exp is 0 instead of what is below
// 2^-126, as is exp_of_negative, of numbers a that are not above 0, which is off by 2 + 2 |a| and
// takes 2 instructions instead of 8.
DSX_UNARY(Floats, rsqrt, ::__frsqrt_rn(a.lanes[i]))
DSX_UNARY(Floats, exp, ::expf(a.lanes[i]))
DSX_UNARY(Floats, exp_of_negative, fast_exp_of_negative(a.lanes[i]))
DSX_UNARY(Floats, power_of_2, fast_exp2(a.lanes[i]))
DSX_UNARY(Floats, log, ::logf(a.lanes[i]))
DSX_UNARY(Floats, sigmoid, ::__fdividef(1.0f, 1.0f + ::expf(-a.lanes[i])))

DSX_UNARY(Floats, reciprocal, fast_reciprocal(a.lanes[i]))
DSX_BINARY(Floats, Floats, ratio, a.lanes[i] * fast_reciprocal(b.lanes[i]))

// e^(-a^2 / 2); and sigmoid for an argument that is rounded anyway. The exponents of 2 are rounded.
DSX_UNARY(Floats, bell, fast_exp2(a.lanes[i] * a.lanes[i] * -0.72134752f))
DSX_UNARY(Floats, rough_sigmoid, fast_reciprocal(1.0f + fast_exp2(a.lanes[i] * -1.44269504f)))

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

// a * b + c, rounded once.
template <int kCount>
__device__ inline Floats<kCount> multiply_add(const Floats<kCount>& a, const Floats<kCount>& b,
                                              const Floats<kCount>& c) {
  DSX_FOR_EACH_LANE(Floats, ::__fmaf_rn(a.lanes[i], b.lanes[i], c.lanes[i]));
}

#undef DSX_UNARY
#undef DSX_BINARY
#undef DSX_FOR_EACH_LANE

// a, or the bound if it is beyond that; NaN if a is NaN.
template <int kCount>
__device__ inline Floats<kCount> at_most(const Floats<kCount>& a, float most) {
  return select(Floats<kCount>(most) < a, Floats<kCount>(most), a);
}
template <int kCount>
__device__ inline Floats<kCount> at_least(const Floats<kCount>& a, float least) {
  return select(a < Floats<kCount>(least), Floats<kCount>(least), a);
}

#include "common/special_functions.inl"

}  // namespace dsx::cuda
