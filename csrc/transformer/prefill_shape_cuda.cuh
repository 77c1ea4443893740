// How a block of prefill_attention is made up on CUDA, and what its warps do with words of two
// elements of 16 bits.
#pragma once

#include "transformer/mma_cuda.cuh"
#include "transformer/paged_kv.h"

namespace dsx::cuda {

// For heads of up to kWidth elements, a block of kWarps with kRowTiles times 16 rows each. They are
// the same rows for each of kKeyGroups groups of warps, which have each a part of every page. Codes
// come as they are, and are then widened to 16 bits: of keys to the type of queries, of values,
// whose weights take their scales and may be tiny, to bfloat16.
template <class QueryType, class StoredType, int kWidthOfTile, int kWarps, int kTilesOfWarp,
          int kGroups>
struct PrefillShape {
  using Query = QueryType;
  using Stored = StoredType;
  static constexpr bool kCodes = sizeof(Stored) == 1;
  using Value = std::conditional_t<kCodes, BFloat16, Query>;
  static constexpr int kThreads = 32 * kWarps, kKeyGroups = kGroups, kRowGroups = kWarps / kGroups;
  static constexpr int kRowTiles = kTilesOfWarp;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kRowGroups * kWarpRows;
  static constexpr int kWidth = kWidthOfTile;
  static constexpr int kSteps = kWidth / 16;  // of 16 elements of a head
  static constexpr int kQueryBytes = kRows * kWidth * 2;
  static constexpr int kTileBytes = kPageTokens * kWidth * 2;
  static constexpr int kCodeBytes = kPageTokens * kWidth;
  static constexpr int kScaleBytes = kPageTokens * 4;
  // What a lane has found: sums of values, and for each row a largest score and a sum of weights.
  static constexpr int kFloatsOfLane = kRowTiles * (kWidth / 2 + 4);
  static constexpr int kStageBytes = 2 * (kCodes ? kCodeBytes + kScaleBytes : kTileBytes);
  DSX_HOST_DEVICE static constexpr int shared_bytes(int stages) {
    const int bytes = kQueryBytes + stages * kStageBytes + (kCodes ? 2 * kTileBytes : 0);
    const int at_the_end = kKeyGroups > 1 ? kRowGroups * 32 * kFloatsOfLane * 4 : 0;
    return bytes > at_the_end ? bytes : at_the_end;
  }

  // Where chunk number `chunk`, of 8 elements, of a row of a tile is: neighbouring rows have the
  // same one in different banks.
  __device__ static int place_of(int row, int chunk) {
    return row * (kWidth * 2) + ((chunk ^ (row & 7)) * 16);
  }
};

// Two floats as the halves of a word, the first one lower; one instruction.
template <class T>
__device__ inline uint32_t rounded_pair(float first, float second) {
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// NaN in a half if that of `sum` was, or that of the word is not finite.
template <class T>
__device__ inline uint32_t mark_not_finite(uint32_t word, uint32_t sum) {
#if __CUDA_ARCH__ >= 800
  uint32_t result;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0), "r"(sum));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0), "r"(sum));
  }
  return result;
#else
  return word | sum;
#endif
}

template <class T>
constexpr uint32_t kInfinityOf = T::kQuietNan == BFloat16::kQuietNan ? 0x7f80 : 0x7c00;

// All bits of the halves of a word that are not finite.
template <class T>
__device__ inline uint32_t not_finite_halves(uint32_t word) {
  constexpr uint32_t kInfinity = kInfinityOf<T>;
  const uint32_t low = (word & kInfinity) == kInfinity ? 0xffff : 0;
  return low | ((word >> 16 & kInfinity) == kInfinity ? 0xffff0000u : 0);
}

// Of each half of a word: 1 if it is what `is` says of its 16 bits, else 0.
template <class T, class Is>
__device__ inline uint32_t ones_where(uint32_t word, const Is& is) {
  constexpr uint32_t kOne = T::kQuietNan == BFloat16::kQuietNan ? 0x3f80 : 0x3c00;
  return (is(word & 0xffff) ? kOne : 0) | (is(word >> 16) ? kOne << 16 : 0);
}

}  // namespace dsx::cuda
