// What blocks of prefill_attention have in shared memory on CUDA, where tensor cores multiply, and
// how a lane finds its part of it.
#pragma once

#include "common/cuda/mma.cuh"
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

// The thread's number, found anew at each call: what follows from it is not kept in registers,
// which are scarce, from one page to the next.
__device__ inline int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// The address of a lane's row of four matrices, in a tile at `tile` whose rows they are. Tiles are
// aligned to their rows, so that a step of 16 elements changes some bits and no others.
template <class Shape>
__device__ inline unsigned begin_of_rows(unsigned tile) {  // both halves of 8 rows, then of 8 more
  const int lane = thread_here() % 32;
  return tile + Shape::place_of(lane % 16, lane / 16);
}
template <class Shape>
__device__ inline unsigned begin_of_columns(unsigned tile) {  // 16 rows, then their second halves
  const int lane = thread_here() % 32;
  return tile + Shape::place_of(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}
template <class Shape>
__device__ inline unsigned further(unsigned begin, int rows, int step) {  // rows: of 8 or more
  return (begin ^ unsigned(step * 32)) + rows * Shape::kRowBytes;
}

// Two floats as the halves of a word, the first one lower; one instruction, of which the compiler
// does not keep the halves apart.
template <class T>
__device__ inline uint32_t rounded_pair(float first, float second) {
#if __CUDA_ARCH__ >= 800
  uint32_t word;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
#else
  return packed<T>(first, second);
#endif
}

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
