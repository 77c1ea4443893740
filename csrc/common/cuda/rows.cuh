// Kernels that work along rows: which thread has which elements of a row, and sums over a row. Both
// depend on the length of the row only, not on where it lies or how many there are, so a row has
// the same bits in any batch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "common/cuda/vector_io.cuh"
#include "common/rows.h"

namespace dsx::cuda {

constexpr int kRowVector = 8;  // consecutive elements of a thread

// kThreads threads take a row together. Each has vectors of kRowVector elements that lie kThreads *
// kRowVector apart. They are held in registers, kVectors at most, if nothing is in the way of whole
// vectors; if kVectors is 0, they are read again each time, with the same bits.
template <int kThreads_, int kVectors_>
struct RowTeam {
  static constexpr int kThreads = kThreads_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kTeams = kThreads < 128 ? 128 / kThreads : 1;  // in a block
  static constexpr int kBlock = kThreads * kTeams;
};

// Calls body with a team that holds rows, and a value of their storage type, or with a team that
// does not, and Any. `whole`: length is a multiple of kRowVector, and all rows are aligned and of
// the dtype of `rows`.
template <class Body>
void with_row_team(int64_t length, bool whole, const Rows& rows, const Body& body) {
  const auto choose = [&](auto held, auto read_again) {
    if (!whole) return body(read_again, Any{});
    with_storage_type(rows.dtype, [&](auto storage) { body(held, storage); });
  };
  constexpr int kVectors = 4;
  if (length <= 32 * kVectors * kRowVector) {
    choose(RowTeam<32, kVectors>{}, RowTeam<32, 0>{});
  } else if (length <= 128 * kVectors * kRowVector) {
    choose(RowTeam<128, kVectors>{}, RowTeam<128, 0>{});
  } else if (length <= 512 * kVectors * kRowVector) {
    choose(RowTeam<512, kVectors>{}, RowTeam<512, 0>{});
  } else {
    body(RowTeam<1024, 0>{}, Any{});
  }
}

// Blocks for so many teams. A kernel whose grid is smaller than that goes on with the rest.
template <class Team>
unsigned blocks_for(int64_t teams) {
  return unsigned(std::min<int64_t>(ceil_div(teams, Team::kTeams), 1 << 30));
}

// The number of a team in the grid, the teams of the grid, and the number of a thread in its team.
template <class Team>
__device__ inline int64_t team_index() {
  return int64_t(blockIdx.x) * Team::kTeams + threadIdx.x / Team::kThreads;
}
template <class Team>
__device__ inline int64_t team_count() {
  return int64_t(gridDim.x) * Team::kTeams;
}
template <class Team>
__device__ inline int thread_of_team() {
  return int(threadIdx.x) % Team::kThreads;
}

// Calls body(v, i, count) for each vector of this thread: number v, the first element i, the count
// of elements that the row still has there, 1 to kRowVector.
template <class Team, class Body>
__device__ inline void for_each_row_vector(int64_t length, const Body& body) {
  constexpr int kStride = Team::kThreads * kRowVector;
  const int64_t first = int64_t(thread_of_team<Team>()) * kRowVector;
  if constexpr (Team::kVectors > 0) {
#pragma unroll
    for (int v = 0; v < Team::kVectors; ++v) {
      if (first + v * kStride < length) body(v, first + v * kStride, kRowVector);
    }
  } else {
#pragma unroll 1
    for (int64_t i = first; i < length; i += kStride) {
      body(0, i, int(::min(int64_t(kRowVector), length - i)));
    }
  }
}

// A vector of a row as it lies in memory, so that many can be asked for before the first is looked
// at; as floats where the storage type is known at run time only.
template <class T>
struct RowVector {
  Elements<T, kRowVector> elements;
};
template <>
struct RowVector<Any> {
  Floats<kRowVector> elements;
};

// Elements from number i on; beyond `count` they are 0. Only Any may be short or not `aligned`.
template <class T>
__device__ inline RowVector<T> fetch(Pointer<T> row, int64_t i, int count, bool aligned) {
  if constexpr (std::is_same_v<T, Any>) {
    if (aligned && count == kRowVector) return {load<Access::vector, kRowVector>(row + i, count)};
    return {load<Access::single, kRowVector>(row + i, count)};
  } else {
    return {load_elements<Access::vector, kRowVector>(row.address + i, count)};
  }
}

template <class T>
__device__ inline Floats<kRowVector> floats_of(const RowVector<T>& vector) {
  if constexpr (std::is_same_v<T, Any>) {
    return vector.elements;
  } else {
    Floats<kRowVector> floats;
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) floats.lanes[k] = widen(vector.elements.lanes[k]);
    return floats;
  }
}

// Rounds to what the row stores, and stores it.
template <class T>
__device__ inline RowVector<T> put(Pointer<T> row, int64_t i, int count, bool aligned,
                                   const Floats<kRowVector>& values) {
  RowVector<T> vector;
  if constexpr (std::is_same_v<T, Any>) {
    vector.elements = rounded(values, row.dtype);
    if (aligned && count == kRowVector) {
      store<Access::vector>(row + i, values, count);
    } else {
      store<Access::single>(row + i, values, count);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) vector.elements.lanes[k] = narrow<T>(values.lanes[k]);
    store_elements<Access::vector>(row.address + i, vector.elements, count);
  }
  return vector;
}

// Whether all vectors of these rows may be accessed 16 bytes at a time. Absent ones do not count.
inline bool all_aligned(std::initializer_list<Rows> all) {
  for (const Rows& rows : all) {
    const uint64_t bytes = uint64_t(bytes_of(rows.dtype));
    const uint64_t bits =
        uint64_t(reinterpret_cast<uintptr_t>(rows.data)) | uint64_t(rows.pitch) * bytes;
    if (rows.data != nullptr && bits % 16 != 0) return false;
  }
  return true;
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
// block call it together, also those of a team that has no row.
template <class Team, int kSums>
__device__ inline void add_over_team(float (&sums)[kSums]) {
  constexpr int kWarp = 32;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      sums[s] += __shfl_xor_sync(0xffffffff, sums[s], distance);
    }
  }
  if constexpr (Team::kThreads > kWarp) {
    constexpr int kWarps = Team::kThreads / kWarp;
    __shared__ float of_warps[kSums][kWarps];
    const int warp = threadIdx.x / kWarp;
    __syncthreads();  // what the last call wrote has been read
    if (threadIdx.x % kWarp == 0) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) of_warps[s][warp] = sums[s];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums[s] += of_warps[s][w];
    }
  }
}

}  // namespace dsx::cuda
