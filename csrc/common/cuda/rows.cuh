// What kernels that work along rows share: consecutive elements of a thread, and sums over a row,
// which depend on its length only, not on where it lies or how many there are, so that a row has
// the same bits in any batch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <span>
#include <type_traits>

#include "common/cuda/vector_io.cuh"
#include "common/rows.h"

namespace dsx::cuda {

constexpr int kRowVector = 8;  // consecutive elements of a thread
constexpr int kWarp = 32;
constexpr int64_t kShortRow = 16 * kRowVector;

// Consecutive elements as they lie in memory, in words that make accesses of 16 bytes; as floats
// where the storage type is known at run time only.
template <class T, int kCount = kRowVector>
struct RowVector {
  static constexpr int kAccesses = int(sizeof(T)) * kCount / 16;
  uint4 words[kAccesses];
};
template <int kCount>
struct RowVector<Any, kCount> {
  Floats<kCount> elements;
};

// Elements from number i on; beyond `count` they are 0. Only Any may be short or not `aligned`.
template <int kCount = kRowVector, class T>
__device__ inline RowVector<T, kCount> fetch(Pointer<T> row, int64_t i, int count, bool aligned) {
  if constexpr (std::is_same_v<T, Any>) {
    if (aligned && count == kCount) return {load<Access::vector, kCount>(row + i, count)};
    return {load<Access::single, kCount>(row + i, count)};
  } else {
    RowVector<T, kCount> vector;
    const uint4* source = reinterpret_cast<const uint4*>(row.address + i);
#pragma unroll
    for (int k = 0; k < vector.kAccesses; ++k) vector.words[k] = source[k];
    return vector;
  }
}

// The floats in one word, and the other way round: two instructions for two numbers of 16 bits.
template <class T>
__device__ inline void unpack(uint32_t word, float* floats) {
  if constexpr (sizeof(T) == sizeof(float)) {
    floats[0] = dsx::float_of(word);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    floats[0] = dsx::float_of(word << 16);
    floats[1] = dsx::float_of(word & 0xffff0000);
  } else {
    floats[0] = __half2float(__ushort_as_half(uint16_t(word)));
    floats[1] = __half2float(__ushort_as_half(uint16_t(word >> 16)));
  }
}
template <class T>
__device__ inline uint32_t pack(const float* floats) {
  uint32_t word;
  if constexpr (sizeof(T) == sizeof(float)) {
    word = dsx::bits_of(floats[0]);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(floats[0], floats[1]);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(floats[0], floats[1]);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <class T, int kCount>
__device__ inline Floats<kCount> floats_of(const RowVector<T, kCount>& vector) {
  if constexpr (std::is_same_v<T, Any>) {
    return vector.elements;
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    Floats<kCount> floats;
#pragma unroll
    for (int k = 0; k < vector.kAccesses; ++k) {
      float* four = floats.lanes + 4 * kPerWord * k;
      unpack<T>(vector.words[k].x, four);
      unpack<T>(vector.words[k].y, four + kPerWord);
      unpack<T>(vector.words[k].z, four + 2 * kPerWord);
      unpack<T>(vector.words[k].w, four + 3 * kPerWord);
    }
    return floats;
  }
}

// Whether what is stored may go first when the cache is full: what a kernel writes once, of
// more than fits there.
enum class Stored { usual, streamed };

// The values as this row stores them.
template <class T, int kCount>
__device__ inline RowVector<T, kCount> packed_for(Pointer<T> row, const Floats<kCount>& values) {
  if constexpr (std::is_same_v<T, Any>) {
    return {rounded(values, row.dtype)};
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    RowVector<T, kCount> vector;
#pragma unroll
    for (int k = 0; k < vector.kAccesses; ++k) {
      const float* four = values.lanes + 4 * kPerWord * k;
      vector.words[k] = {pack<T>(four), pack<T>(four + kPerWord), pack<T>(four + 2 * kPerWord),
                         pack<T>(four + 3 * kPerWord)};
    }
    return vector;
  }
}

// Stores a whole vector.
template <Stored stored = Stored::usual, class T, int kCount>
__device__ inline void put_vector(Pointer<T> row, int64_t i, const RowVector<T, kCount>& vector) {
  uint4* target = reinterpret_cast<uint4*>(row.address + i);
#pragma unroll
  for (int k = 0; k < vector.kAccesses; ++k) {
    const uint4& w = vector.words[k];
    // An assignment would do, did the compiler not take some of them apart.
    if constexpr (stored == Stored::streamed) {
      asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target + k), "r"(w.x),
                   "r"(w.y), "r"(w.z), "r"(w.w)
                   : "memory");
    } else {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target + k), "r"(w.x), "r"(w.y),
                   "r"(w.z), "r"(w.w)
                   : "memory");
    }
  }
}

// Rounds to what the row stores, and stores it.
template <Stored stored = Stored::usual, class T, int kCount>
__device__ inline void put(Pointer<T> row, int64_t i, int count, bool aligned,
                           const Floats<kCount>& values) {
  if constexpr (std::is_same_v<T, Any>) {
    if (aligned && count == kCount) {
      store<Access::vector>(row + i, values, count);
    } else {
      store<Access::single>(row + i, values, count);
    }
  } else {
    put_vector<stored>(row, i, packed_for(row, values));
  }
}

// The first `count` lanes, and zeros. Only of Any may vectors be short.
template <class T>
__device__ inline Floats<kRowVector> first_lanes(Floats<kRowVector> values, int count) {
  if constexpr (std::is_same_v<T, Any>) {
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) values.lanes[k] = k < count ? values.lanes[k] : 0.0f;
  }
  return values;
}

// Whether all vectors of these rows may be accessed 16 bytes at a time. Absent ones do not count.
inline bool all_aligned(std::span<const Rows> all) {
  for (const Rows& rows : all) {
    const uint64_t bytes = uint64_t(bytes_of(rows.dtype));
    const uint64_t bits = uint64_t(reinterpret_cast<uintptr_t>(rows.data)) |
                          uint64_t(rows.pitch | rows.group_pitch) * bytes;
    if (rows.is_present() && bits % 16 != 0) return false;
  }
  return true;
}

inline bool all_aligned(std::initializer_list<Rows> all) {
  return all_aligned(std::span(all.begin(), all.size()));
}

// The sum of the lanes in a fixed tree.
__device__ inline float sum_of_lanes(Floats<kRowVector> values) {
#pragma unroll
  for (int half = kRowVector / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) values.lanes[k] += values.lanes[k + half];
  }
  return values.lanes[0];
}

// Adds each of `sums` over the threads of a team; every thread gets the totals. All threads of the
// block call it together, also those of a team that has no row; `number` goes up by one each time.
template <class Team, int kSums>
__device__ inline void add_over_team(float (&sums)[kSums], int number) {
  const auto add_over_warp = [&] {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int distance = (Team::kShort ? 16 : kWarp) / 2; distance > 0; distance /= 2) {
        sums[s] += __shfl_xor_sync(0xffffffff, sums[s], distance);
      }
    }
  };
  add_over_warp();
  if (Team::kShort || blockDim.x == kWarp) return;
  // Two buffers, one after the other: nobody writes to one before all have read it and come to the
  // barrier of the other.
  __shared__ float of_warps[2][kSums][kWarp];
  const int warps = int(blockDim.x) / kWarp;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) of_warps[number % 2][s][warp] = sums[s];
  }
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    sums[s] = lane < warps ? of_warps[number % 2][s][lane] : 0.0f;
  }
  add_over_warp();
}

}  // namespace dsx::cuda
