// Compiles the file DSX_KERNEL_SOURCE once per ISA, in dsx::scalar, dsx::baseline and, on x86-64,
// dsx::avx2 and dsx::avx512; DSX_DISPATCH_ISA calls one of the copies.
//
// Each copy sees that ISA's `Vec`, a register of floats, `Mask`, a truth value for each lane, and
// `Ints`, as many unsigned integers of 32 bits:
//   Vec::size                        floats in a register
//   Vec(value)                       the same float in every lane
//   Vec::load(source, count)         the first `count` elements, 1 to size; other lanes are 0
//   vec.store(target, count)         writes the first `count` lanes and nothing beyond them
//   vec.store(target, count, true)   the same past the cache: whole registers, where a line begins
//                                    or some registers further on (past_cache.h)
//   a + b, a - b, a * b, a / b, -a, abs(a), sqrt(a), floor(a)
//   min(a, b), max(a, b), round_even(a), select(mask, a, b): as common/math.h says
//   at_least(a, bound), at_most(a, bound), times_power_of_2(a, k): as vec_derived.inl says
//   swap_neighbours(a)               lanes 0 and 1, 2 and 3 ... change places; not in Vecs of 1
//   a < b, a <= b, a > b, a >= b, a == b, a != b, mask & mask, mask | mask, !mask
//   any(mask)                        whether a lane is true, one beyond `count` perhaps
//   bits_of(vec), float_of(ints), Ints::from(first), + - * & | ^, min, max, max_of(ints)
//   shift_left<bits>(ints), shift_right<bits>(ints), blend_bits(mask, a, b): a where mask has a 1
//   signed_numbers(ints)             as floats, of two's complement
//   sums_of_fours(ints, sums), transpose_quarters(a, b): as vec_derived.inl says
//   Ints load uint8_t, uint16_t, int16_t (sign extended), and store the first two
//   Lookup(floats)[ints], load_fours(source, pitch, part), Dots::add<bits>(ints, ints, ints): as
//                                    vec_scalar.inl says
// Memory holds float, BFloat16 or Half, at any alignment; source and target are a T*, a Pointer<T>
// or a Pointer<Any>. All ISAs give the same bits. In a thread that flushes subnormals to zero they
// may differ in which of them min and max have flushed, and conversions flush nothing.
//
// DSX_WITHOUT_BASELINE and DSX_WITHOUT_AVX2 leave a copy out, in whose place the scalar one runs:
// with sanitizers a copy takes a compiler half a minute.
//
// Target regions, not -march flags: a flag would also let the compiler use wide instructions in
// inline functions of the standard library, and the linker may keep that copy for CPUs that lack
// them. For the same reason every standard header is included here, before the first region.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/math.h"
#include "common/pointer.h"
#include "common/simd/isa.h"

// GCC 12 warns of undefined operands that its own AVX-512 intrinsics use on purpose (bug 105593).
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__) && defined(__clang__)
#include <immintrin.h>
#elif defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace dsx::scalar {
#include "common/simd/vec_scalar.inl"
#include "common/simd/vec_derived.inl"
#include "common/simd/vec_math.inl"
#include "common/special_functions.inl"
#include "common/simd/for_each_vector.inl"
#include DSX_KERNEL_SOURCE
}  // namespace dsx::scalar

#ifdef DSX_WITHOUT_BASELINE
namespace dsx {
namespace baseline = scalar;
}
#else
namespace dsx::baseline {
#include "common/simd/vec_baseline.inl"
#include "common/simd/vec_derived.inl"
#include "common/simd/vec_math.inl"
#include "common/special_functions.inl"
#include "common/simd/for_each_vector.inl"
#include DSX_KERNEL_SOURCE
}  // namespace dsx::baseline
#endif

// DSX_DISPATCH_ISA(isa, function(arguments)) calls the copy of one ISA and has its value.
#ifndef __x86_64__

#define DSX_DISPATCH_ISA(isa, ...) \
  ((isa) == dsx::Isa::baseline ? dsx::baseline::__VA_ARGS__ : dsx::scalar::__VA_ARGS__)

#else

#define DSX_DISPATCH_ISA(isa, ...)                            \
  ((isa) == dsx::Isa::avx512     ? dsx::avx512::__VA_ARGS__   \
   : (isa) == dsx::Isa::avx2     ? dsx::avx2::__VA_ARGS__     \
   : (isa) == dsx::Isa::baseline ? dsx::baseline::__VA_ARGS__ \
                                 : dsx::scalar::__VA_ARGS__)

#define DSX_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define DSX_TARGET_BEGIN(isa) \
  DSX_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define DSX_TARGET_END DSX_PRAGMA(clang attribute pop)
#else
#define DSX_TARGET_BEGIN(isa) DSX_PRAGMA(GCC push_options) DSX_PRAGMA(GCC target(isa))
#define DSX_TARGET_END DSX_PRAGMA(GCC pop_options)
#endif

#ifdef DSX_WITHOUT_AVX2
namespace dsx {
namespace avx2 = scalar;
}
#else
DSX_TARGET_BEGIN("avx2,fma,f16c")
namespace dsx::avx2 {
#include "common/simd/vec_avx2.inl"
#include "common/simd/vec_derived.inl"
#include "common/simd/vec_math.inl"
#include "common/special_functions.inl"
#include "common/simd/for_each_vector.inl"
#include DSX_KERNEL_SOURCE
}  // namespace dsx::avx2
DSX_TARGET_END
#endif

DSX_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx2,fma,f16c")
namespace dsx::avx512 {
#include "common/simd/vec_avx512.inl"
#include "common/simd/vec_derived.inl"
#include "common/simd/vec_math.inl"
#include "common/special_functions.inl"
#include "common/simd/for_each_vector.inl"
#include DSX_KERNEL_SOURCE
}  // namespace dsx::avx512
DSX_TARGET_END

#endif  // __x86_64__
