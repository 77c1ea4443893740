// Codes of keys and values as numbers of 16 bits, which hold all of them, in their order.
#pragma once

#include <cuda_fp8.h>

#include "common/cuda/mma_tiles.cuh"
#include "attention/cache/paged_kv.h"

namespace dsx::cuda {

// Two of the codes of a word, the first two or the last two, as the halves of a word of type T.
template <class T, bool kLast>
__device__ inline uint32_t widened_int8(uint32_t codes) {
  uint32_t result = 0;
#if __CUDA_ARCH__ >= 800
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    // Behind 0x43, a byte of less than 128 makes 128 and as much; the highest bit makes 256 of 128.
    const uint32_t halves = __byte_perm(codes, 0x43434343, kLast ? 0x4342 : 0x4140);
    const uint32_t more = halves & 0xff7fff7f, base = halves & 0xff80ff80;
#if __CUDA_ARCH__ >= 900
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(more), "r"(base));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(base), "r"(0xbf80bf80u), "r"(more));
#endif
  } else {  // 1024 + 128 + the number, less that
    const uint32_t positive = codes ^ 0x80808080;
    const uint32_t halves = __byte_perm(positive, 0x64646464, kLast ? 0x4342 : 0x4140);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(halves), "r"(0x64806480u));
  }
#endif
  return result;
}

// Four codes as two words of two elements each.
template <class T, class Stored>
__device__ inline void widen_codes(uint32_t codes, uint32_t* words) {
  if constexpr (std::is_same_v<Stored, Fp8Kv>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto pair = __nv_fp8x2_storage_t(codes >> 16 * i);
      const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3);
      if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
        const float2 floats = __half22float2(__half2(raw));
        words[i] = rounded_pair<T>(floats.x, floats.y);
      } else {
        words[i] = uint32_t(raw.x) | uint32_t(raw.y) << 16;
      }
    }
  } else {
    words[0] = widened_int8<T, false>(codes);
    words[1] = widened_int8<T, true>(codes);
  }
}

}  // namespace dsx::cuda
