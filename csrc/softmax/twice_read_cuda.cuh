// Rows of any length that are read twice: once for what depends on all of the row, once to write
// what follows from it. The second time they come from the cache of the multiprocessor, which a row
// most often fits into: that is faster than to keep them in registers or in shared memory, as there
// is memory for more threads then.
#pragma once

#include <climits>

#include "common/cuda/check.h"
#include "common/cuda/row_parts.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// The threads that take a row together, in a loop, and how many vectors each of them takes in an
// iteration: these lie as far apart as all threads of the team reach. Half a warp for a short row,
// else a block, of so many threads that one iteration is enough where that is possible.
enum class RowLength { is_short, of_one_iteration, is_long };
template <RowLength kLength_, int kVectors_>
struct LoopingTeam {
  static constexpr RowLength kLength = kLength_;
  static constexpr bool kShort = kLength == RowLength::is_short;
  static constexpr bool kOneIteration = kLength != RowLength::is_long;
  static constexpr int kVectors = kShort ? 1 : kVectors_;
  static constexpr int kIterationsOfPart = kVectorsOfPart / kVectors;
  static constexpr int kTeams = kShort ? 16 : 1;           // in a block
  static constexpr int kMostThreads = kShort ? 256 : 512;  // of a block
  static constexpr int64_t kMostPerIteration =
      kShort ? kShortRow : int64_t(kMostThreads) * kVectors * kRowVector;

  __device__ static int threads() { return kShort ? 16 : int(blockDim.x); }
  __device__ static int thread() { return kShort ? int(threadIdx.x) % 16 : int(threadIdx.x); }
  // Perhaps one beyond the last.
  __device__ static int64_t row() {
    return kShort ? int64_t(blockIdx.x) * kTeams + int(threadIdx.x) / 16 : int64_t(blockIdx.x);
  }
};

// A column of a row whose vectors are whole fits into 32 bits.
template <class T>
using Column = std::conditional_t<std::is_same_v<T, Any>, int64_t, int>;

using RowFloats = Floats<kRowVector>;  // of a RowVector

// Elements that are read again soon, or that are not.
enum class Kept { yes, no };
template <Kept kept, class T>
__device__ inline RowVector<T> fetch_for(Pointer<T> row, Column<T> i, int count, bool aligned) {
  if constexpr (std::is_same_v<T, Any>) {
    return fetch(row, i, count, aligned);
  } else {
    RowVector<T> vector;
    const uint4* source = reinterpret_cast<const uint4*>(row.address + i);
#pragma unroll
    for (int k = 0; k < vector.kAccesses; ++k) {
      uint4& w = vector.words[k];
      if constexpr (kept == Kept::yes) {
        asm volatile("ld.global.L1::evict_last.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "l"(source + k)
                     : "memory");
      } else {
        asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "l"(source + k)
                     : "memory");
      }
    }
    return vector;
  }
}

// One row of kTensors tensors, and the thread's part of it. Columns outside of [first, end) are not
// read. T is the storage type of all tensors, or Any.
template <class Team, class T, int kTensors>
struct TwiceRead {
  Pointer<T> tensors[kTensors];
  Column<T> first, end, length;  // length 0: there is no such row
  bool aligned;

  __device__ bool touches(Column<T> i) const { return i + kRowVector > first && i < end; }

  // Calls body(v, i, count, values, is_read) for each vector, iteration by iteration, with an
  // array of kTensors, which what is not read has not; v is its number in the iteration.
  template <Kept kept, class Body>
  __device__ void read_first(const Body& body) const {
    read_parts<kept>(body, [] {});
  }

  // The same of teams with kInParts; calls end_part() after each part, by all threads of a block.
  template <Kept kept, class Body, class EndPart>
  __device__ void read_parts(const Body& body, const EndPart& end_part) const {
    if constexpr (Team::kOneIteration) {
      if (length > 0) read_iteration<kept>(0, body);
      end_part();
    } else {
      const Column<T> per_iteration = stride() * Team::kVectors;
      int iterations = 0;
#pragma unroll 1
      for (Column<T> begin = 0; begin < length; begin += per_iteration) {
        read_iteration<kept>(begin, body);
        const bool is_last = begin + per_iteration >= length;
        if (++iterations % Team::kIterationsOfPart == 0 || is_last) end_part();
      }
    }
  }

  // The same, beginning with the last iteration, which the cache has if it does not have all.
  template <class Body>
  __device__ void read_again(const Body& body) const {
    const Column<T> per_iteration = stride() * Team::kVectors;
    Column<T> begin =
        Team::kOneIteration || length == 0 ? 0 : (length - 1) / per_iteration * per_iteration;
    for (; begin >= 0 && begin < length; begin -= per_iteration) {
      read_iteration<Kept::no>(begin, body);
      if (Team::kOneIteration) break;
    }
  }

  // The vectors of a row of one iteration, without reading it.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
#pragma unroll
    for (int v = 0; v < Team::kVectors; ++v) {
      const Column<T> i = column(0, v);
      if (i < length) body(v, i, kRowVector, touches(i));
    }
  }

  // All of the row once more, with less code: for what is seldom needed.
  template <class Body>
  __device__ void read_slowly(const Body& body) const {
#pragma unroll 1
    for (Column<T> i = column(0, 0); i < length; i += stride()) {
      read_vector(0, i, body);
    }
  }

 private:
  __device__ static Column<T> stride() { return Column<T>(Team::threads()) * kRowVector; }
  __device__ static Column<T> column(Column<T> begin, int v) {
    return begin + v * stride() + Team::thread() * kRowVector;
  }

  template <Kept kept, class Body>
  __device__ void read_iteration(Column<T> begin, const Body& body) const {
    if constexpr (std::is_same_v<T, Any>) {
#pragma unroll 1
      for (int v = 0; v < Team::kVectors; ++v) {
        const Column<T> i = column(begin, v);
        if (i < length) read_vector(v, i, body);
      }
    } else {
      RowVector<T> vectors[Team::kVectors][kTensors];
#pragma unroll
      for (int v = 0; v < Team::kVectors; ++v) {
        const Column<T> i = column(begin, v);
        if (!touches(i)) continue;
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          vectors[v][t] = fetch_for<kept>(tensors[t], i, kRowVector, aligned);
        }
      }
#pragma unroll
      for (int v = 0; v < Team::kVectors; ++v) {
        const Column<T> i = column(begin, v);
        if (i >= length) continue;
        RowFloats values[kTensors];
#pragma unroll
        for (int t = 0; t < kTensors; ++t) values[t] = floats_of(vectors[v][t]);
        body(v, i, kRowVector, values, touches(i));
      }
    }
  }

  template <class Body>
  __device__ void read_vector(int v, Column<T> i, const Body& body) const {
    const int count = int(::min(Column<T>(kRowVector), length - i));
    RowFloats values[kTensors];
    if (touches(i)) {
#pragma unroll
      for (int t = 0; t < kTensors; ++t) {
        values[t] = floats_of(fetch(tensors[t], i, count, aligned));
      }
    }
    body(v, i, count, values, touches(i));
  }
};

// Whether all that are present have this dtype, and can be accessed in whole vectors.
inline bool are_whole(std::initializer_list<Rows> all, int64_t length, Dtype dtype) {
  const bool same = std::all_of(all.begin(), all.end(), [&](const Rows& rows) {
    return !rows.is_present() || rows.dtype == dtype;
  });
  return same && all_aligned(all) && length % kRowVector == 0 && length < int64_t(1) << 30;
}

struct TeamLaunch {
  unsigned blocks;
  int threads;
};

// Calls body(team, storage, launch) for rows of this length. `whole`: they are, of this dtype;
// kInParts: teams take a part of a long row in whole iterations.
template <int kVectors, bool kInParts = false, class Body>
void with_looping_team(int64_t rows, int64_t length, bool whole, Dtype dtype, const char* op,
                       const Body& body) {
  const auto choose = [&](auto team) {
    using Team = decltype(team);
    const int64_t blocks = ceil_div(rows, Team::kTeams);
    if (blocks > INT_MAX) {
      throw std::runtime_error(std::string(op) + ": x has " + std::to_string(rows) +
                               " rows, expected fewer than 2^31");
    }
    const int64_t warps = ceil_div(length, kWarp * Team::kVectors * kRowVector);
    const int64_t threads = kInParts && !Team::kOneIteration
                                ? part_of(length) / kPartOfThread
                                : std::min<int64_t>(warps * kWarp, Team::kMostThreads);
    const TeamLaunch launch{unsigned(blocks), Team::kShort ? Team::kMostThreads : int(threads)};
    if (!whole) return body(team, Any{}, launch);
    with_storage_type(dtype, [&](auto storage) { body(team, storage, launch); });
  };
  using OneIteration = LoopingTeam<RowLength::of_one_iteration, kVectors>;
  if (length <= kShortRow) return choose(LoopingTeam<RowLength::is_short, kVectors>{});
  if (length <= OneIteration::kMostPerIteration) return choose(OneIteration{});
  choose(LoopingTeam<RowLength::is_long, kVectors>{});
}

}  // namespace dsx::cuda
