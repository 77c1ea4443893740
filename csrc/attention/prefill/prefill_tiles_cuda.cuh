// What blocks of prefill_attention have in shared memory on CUDA, where tensor cores multiply, and
// how a lane finds its part of it.
#pragma once

#include "common/cuda/mma_tiles.cuh"
#include "attention/prefill/prefill.h"

namespace dsx::cuda {

// For heads of up to kWidth elements; a warp has kRowTiles times 16 rows. A block is one group of
// warps, or two that have the same rows and every other page each. Codes come as they are, and are
// then widened to 16 bits: of keys to the type of queries, of values, whose weights take their
// scales and may be tiny, to bfloat16.
template <class Query, class Stored, int kHeadWidth>
struct PrefillShape {
  using T = Query;
  using Kind = Stored;
  static constexpr int kWidth = kHeadWidth, kRowTiles = kWidth <= 128 ? 2 : 1;
  static constexpr bool kCodes = sizeof(Stored) == 1;
  using Value = std::conditional_t<kCodes, BFloat16, T>;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kGroups = 2;  // at most
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kSteps = kWidth / 16;  // of 16 elements of a head
  static constexpr int kRowBytes = kWidth * 2;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kTileBytes = kPageTokens * kRowBytes;
  static constexpr int kCodeBytes = kPageTokens * kWidth;
  static constexpr int kScaleBytes = kCodes ? kPageTokens * 4 : 0;
  // Of a group: tiles of keys and of values; and if those are widened codes, keys and values as
  // they come, and the scales of the tiles. All tiles are aligned to their rows.
  static constexpr int kComingBytes = kCodes ? kCodeBytes + kScaleBytes : 0;
  static constexpr int kGroupBytes = 2 * (kTileBytes + kComingBytes + kScaleBytes);
  static_assert(kQueryBytes % kRowBytes == 0 && kGroupBytes % kRowBytes == 0);
  // What a lane of one group leaves to the other: sums of values, the largest score, their sum.
  static constexpr int kLaneFloats = kRowTiles * (kWidth / 2 + 4);

  static constexpr int shared_bytes(int groups) {
    const int all = kQueryBytes + groups * kGroupBytes;
    const int left = groups > 1 ? kThreads * kLaneFloats * 4 : 0;
    return all > left ? all : left;
  }

  // Where chunk number `chunk`, of 8 elements, of a row of a tile is: neighbouring rows have the
  // same one in different banks.
  __device__ static int place_of(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) * 16);
  }
};

template <class T>
constexpr uint32_t kInfinityOf = T::kQuietNan == BFloat16::kQuietNan ? 0x7f80 : 0x7c00;

// All bits of the halves of a word that are not finite.
template <class T>
__device__ inline uint32_t non_finite_halves(uint32_t word) {
  constexpr uint32_t kInfinity = kInfinityOf<T>;
  const uint32_t low = (word & kInfinity) == kInfinity ? 0xffff : 0;
  return low | ((word >> 16 & kInfinity) == kInfinity ? 0xffff0000u : 0);
}

}  // namespace dsx::cuda
