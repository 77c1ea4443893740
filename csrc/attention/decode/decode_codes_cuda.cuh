// Codes of keys and values as numbers of 16 bits, which hold all of them.
#pragma once

#include "common/cuda/convert.cuh"
#include "attention/cache/paged_kv.h"

namespace dsx::cuda {

// Two of the codes of a word as numbers of type Half: of int8 bytes 0 and 2, or 1 and 3; of fp8
// bytes 0 and 1, or 2 and 3.
template <class Kind, bool kSecond>
__device__ inline uint32_t widened(uint32_t word) {
  uint32_t result = 0;
#if __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<Kind, Fp8Kv>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(uint16_t(kSecond ? word >> 16 : word)));
    return result;
  }
#endif
#if __CUDA_ARCH__ >= 800
  const auto multiplied_by_256 = [](uint32_t pair) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x5c005c00u));
    return pair;
  };
  if constexpr (std::is_same_v<Kind, Int8Kv>) {  // 1024 + 128 + the number, less that
    const uint32_t bytes = kSecond ? word >> 8 : word;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;"
        : "=r"(result)
        : "r"(bytes), "r"(0x00ff00ffu), "r"(0x64806480u));
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(result) : "r"(0x64806480u));
  } else {  // bits where they belong, then what exponents are off by
    const uint32_t halves = __byte_perm(word, 0, kSecond ? 0x3424 : 0x1404);
    const uint32_t magnitude = halves >> 1 & 0x3f803f80;
    result = multiplied_by_256(magnitude | (halves & 0x80008000));
    if ((magnitude & 0xffff) == 0x3f80) result |= 0x7fff;
    if (magnitude >> 16 == 0x3f80) result |= 0x7fff0000;
  }
#endif
  return result;
}

// A word of two elements of a token and of the same of the next token, so that the above has those
// of both tokens together.
template <class Kind>
__device__ inline uint32_t for_values(uint32_t word) {
  return std::is_same_v<Kind, Int8Kv> ? word : __byte_perm(word, 0, 0x3120);
}

// The highest bit of each byte: whether it is the code of NaN.
__device__ inline uint32_t nan_codes(uint32_t word) {
  return ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
}

}  // namespace dsx::cuda
