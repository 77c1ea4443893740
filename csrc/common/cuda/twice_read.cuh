// Rows of any length that are read twice: once for what depends on all of the row, once to write
// what follows from it. In between, a row stays in registers, or in shared memory as far as it has
// room, or is read again, from the cache: with the same bits, as a thread has the same elements in
// the same order.
#pragma once

#include "common/cuda/check.h"
#include "common/cuda/fetch.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// A block for a row that is longer than a RowTeam can hold.
template <bool kShared>
struct LongRowTeam {
  static constexpr bool kShort = false;
  static constexpr int kVectors = 0, kTeams = 1, kMostThreads = 1024;

  __device__ static int threads() { return kMostThreads; }
  __device__ static int thread() { return int(threadIdx.x); }
  __device__ static int team() { return 0; }
};

// Vectors of each thread that shared memory has room for, of each of kTensors tensors.
template <class Team, class T, int kTensors>
constexpr int kSharedVectors = 0;
template <class T, int kTensors>
constexpr int kSharedVectors<LongRowTeam<true>, T, kTensors> =
    13 / (kTensors * RowVector<T>::kAccesses);

template <class Team, class T, int kTensors>
constexpr int kSharedBytes = 0;
template <class T, int kTensors>
constexpr int kSharedBytes<LongRowTeam<true>, T, kTensors> =
    kSharedVectors<LongRowTeam<true>, T, kTensors> * kTensors * RowVector<T>::kAccesses * 16 *
    LongRowTeam<true>::kMostThreads;

// One row of kTensors tensors. Columns outside of [first, end) are not read.
template <class T, int kTensors>
struct RowOf {
  Pointer<T> tensors[kTensors];
  int64_t first, end, length;  // length 0: there is no such row

  __device__ bool touches(int64_t i) const { return i + kRowVector > first && i < end; }
};

// The same of which all columns are read.
template <class T, int kTensors>
struct WholeRowOf {
  Pointer<T> tensors[kTensors];
  int64_t length;  // 0: there is no such row

  __device__ static bool touches(int64_t /*i*/) { return true; }
};

template <class Team, class T, int kTensors, class RowKind = RowOf<T, kTensors>>
class TwiceRead {
 public:
  using Row = RowKind;
  using Values = Floats<kRowVector>;

  __device__ explicit TwiceRead(bool aligned) : aligned_(aligned) {}

  // Before the first row of this thread's team.
  __device__ void begin(const Row& row) {
    if constexpr (kShared > 0) {
      for (int v = 0; v < kShared; ++v) {
        fetch_shared(row, v);
        end_fetches();
      }
      ask_for_rest(row);
    }
  }

  // Calls body(v, i, count, values) for each vector that is read, with an array of kTensors; v is
  // its number among those of this thread, if the team holds them. `next` is the team's next row,
  // of length 0 if there is none.
  template <class Body>
  __device__ void first(const Row& row, const Row& next, const Body& body) {
    read<false>(row, next, body);
  }

  // The same for a row that is not read a second time.
  template <class Body>
  __device__ void once(const Row& row, const Row& next, const Body& body) {
    read<true>(row, next, body);
  }

  // Puts another vector in the place of what was read of the first tensor, for the next times. What
  // there is no room for is read again from the row that is then given.
  __device__ void keep(int v, const RowVector<T>& vector) {
    if constexpr (kShared > 0) {
      if (v >= kShared) return;
#pragma unroll
      for (int k = 0; k < RowVector<T>::kAccesses; ++k) *shared_place(v, 0, k) = vector.words[k];
    } else if constexpr (Team::kVectors > 0) {
      held_[0][v] = vector;
    }
  }

  // Reads it once more in between.
  template <class Body>
  __device__ void again(const Row& row, const Body& body) const {
    if constexpr (kShared > 0) {
      for_each_vector_of_long(row, [&](int v, int64_t i) {
        if (i >= row.length || !row.touches(i)) return;
        Values values[kTensors];
        get_of_long(row, v, i, values);
        body(v, i, kRowVector, values);
      });
      return;
    }
    for_each_row_vector<Team>(row.length, [&](int v, int64_t i, int count) {
      if (!row.touches(i)) return;
      Values values[kTensors];
      get(row, v, i, count, values);
      body(v, i, count, values);
    });
  }

  // The same from memory, in little code, for what is rare.
  template <class Body>
  __device__ void from_memory(const Row& row, const Body& body) const {
#pragma unroll 1
    for (int64_t i = Team::thread() * kRowVector; i < row.length;
         i += Team::threads() * kRowVector) {
      const int count = int(::min(int64_t(kRowVector), row.length - i));
      if (!row.touches(i)) continue;
      Values values[kTensors];
      load(row, i, count, values);
      body(i, count, values);
    }
  }

  // Calls body(v, i, count, values, is_read) for each vector of the row, with anything for what is
  // not read, and begins with the next row.
  template <class Body>
  __device__ void second(const Row& row, const Row& next, const Body& body) {
    if constexpr (kShared > 0) {
      for_each_vector_of_long(row, [&](int v, int64_t i) {
        if (i < row.length) {
          Values values[kTensors];
          const bool is_read = row.touches(i);
          if (is_read) get_of_long(row, v, i, values);
          body(v, i, kRowVector, values, is_read);
        }
        if (v >= kShared) return;
        fetch_shared(next, v);
        end_fetches();
        if (v == kShared - 1) ask_for_rest(next);
      });
      return;
    }
    for_each_row_vector<Team>(row.length, [&](int v, int64_t i, int count) {
      Values values[kTensors];
      const bool is_read = row.touches(i);
      if (is_read) get(row, v, i, count, values);
      body(v, i, count, values, is_read);
    });
  }

 private:
  static constexpr int kShared = kSharedVectors<Team, T, kTensors>;
  static constexpr int kStride = Team::kMostThreads * kRowVector;  // of a team that is a full block

  template <bool kOnce, class Body>
  __device__ void read(const Row& row, const Row& next, const Body& body) {
    if constexpr (kShared > 0) {
      for_each_vector_of_long(row, [&](int v, int64_t i) {
        // There are always kShared under way, so the first has come.
        if (v < kShared) wait_for_fetches<kShared - 1>();
        if (i < row.length && row.touches(i)) {
          Values values[kTensors];
          get_of_long(row, v, i, values);
          body(v, i, kRowVector, values);
        }
        if (v >= kShared) return;
        if constexpr (kOnce) fetch_shared(next, v);
        end_fetches();
        if (kOnce && v == kShared - 1) ask_for_rest(next);
      });
      return;
    }
    if constexpr (Team::kVectors > 0) {
      for_each_row_vector<Team>(row.length, [&](int v, int64_t i, int count) {
        if (!row.touches(i)) return;
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          held_[t][v] = fetch(row.tensors[t], i, count, aligned_);
        }
      });
      for_each_row_vector<Team>(next.length, [&](int /*v*/, int64_t i, int /*count*/) {
        if (next.touches(i)) ask_for(next, i);
      });
    }
    for_each_row_vector<Team>(row.length, [&](int v, int64_t i, int count) {
      if (!row.touches(i)) return;
      Values values[kTensors];
      get(row, v, i, count, values);
      body(v, i, count, values);
    });
  }

  // Calls body(v, i) for the vectors of this thread that shared memory has room for, also those
  // beyond the row, and for the rest of the row: one body, as long ones take long to compile.
  template <class Body>
  __device__ static void for_each_vector_of_long(const Row& row, const Body& body) {
    int64_t i = Team::thread() * kRowVector;
#pragma unroll 1
    for (int v = 0; v < kShared || i < row.length; ++v, i += kStride) body(v, i);
  }

  __device__ void get_of_long(const Row& row, int v, int64_t i, Values (&values)[kTensors]) const {
    if (v < kShared) return load_shared(v, values);
    load(row, i, kRowVector, values);
  }

  __device__ void load(const Row& row, int64_t i, int count, Values (&values)[kTensors]) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      values[t] = floats_of(fetch(row.tensors[t], i, count, aligned_));
    }
  }

  __device__ void get(const Row& row, int v, int64_t i, int count,
                      Values (&values)[kTensors]) const {
    if constexpr (Team::kVectors > 0) {
#pragma unroll
      for (int t = 0; t < kTensors; ++t) values[t] = floats_of(held_[t][v]);
    } else {
      load(row, i, count, values);
    }
  }

  // Where this thread keeps its vector number v, one access of 16 bytes after the other.
  __device__ static uint4* shared_place(int v, int tensor, int access) {
    extern __shared__ __align__(16) uint4 shared_vectors[];
    return shared_vectors +
           ((v * kTensors + tensor) * RowVector<T>::kAccesses + access) * Team::kMostThreads +
           Team::thread();
  }

  __device__ static void load_shared(int v, Values (&values)[kTensors]) {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      RowVector<T> vector;
#pragma unroll
      for (int k = 0; k < vector.kAccesses; ++k) vector.words[k] = *shared_place(v, t, k);
      values[t] = floats_of(vector);
    }
  }

  // Begins to fetch a vector to where the same thread has read its last one.
  __device__ static void fetch_shared(const Row& row, int v) {
    const int64_t i = int64_t(v) * kStride + Team::thread() * kRowVector;
    if (i >= row.length || !row.touches(i)) return;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      const uint4* far = reinterpret_cast<const uint4*>(row.tensors[t].address + i);
#pragma unroll
      for (int k = 0; k < RowVector<T>::kAccesses; ++k) {
        fetch_bytes<16>(shared_place(v, t, k), far + k);
      }
    }
  }

  // Asks for elements that will be loaded soon, without a register to load them into.
  __device__ static void ask_for(const Row& row, int64_t i) {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row.tensors[t].address + i));
    }
  }

  // What shared memory has no room for.
  __device__ static void ask_for_rest(const Row& row) {
    int64_t i = int64_t(kShared) * kStride + Team::thread() * kRowVector;
    for (; i < row.length; i += kStride) {
      if (row.touches(i)) ask_for(row, i);
    }
  }

  static constexpr bool kInRegisters = Team::kVectors > 0;
  RowVector<T> held_[kInRegisters ? kTensors : 1][kInRegisters ? Team::kVectors : 1];
  bool aligned_;
};

// Calls body(first row of this team or one beyond the end, the next one, turn) for each row of the
// team of this thread; every thread of a block as often.
template <class Team, class Body>
__device__ inline void for_each_row_of_team(int64_t rows, const Body& body) {
  const int64_t step = int64_t(gridDim.x) * Team::kTeams;
  int64_t first = int64_t(blockIdx.x) * Team::kTeams;  // of the block
  for (int turn = 0; first < rows; ++turn, first += step) {
    const int64_t row = first + Team::team();
    body(row, row + step, turn);
  }
}

// Whether all that are present have this dtype, and can be accessed in whole vectors.
inline bool are_whole(std::initializer_list<Rows> all, int64_t length, Dtype dtype) {
  const bool same = std::all_of(all.begin(), all.end(), [&](const Rows& rows) {
    return rows.data == nullptr || rows.dtype == dtype;
  });
  return same && all_aligned(all) && length % kRowVector == 0;
}

struct TwiceReadLaunch {
  unsigned blocks;
  int threads, shared_bytes;
};

// What depends on the device; throws std::runtime_error.
struct DeviceLimits {
  int multiprocessors = 0, shared_bytes = 0;

  explicit DeviceLimits(const char* op) {
    int device = 0;
    check(cudaGetDevice(&device), op);
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), op);
    check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          op);
  }
};

// Calls body(team, storage, launch) for rows of this length. `whole`: the length is a multiple of
// kRowVector, and all rows are aligned and of this dtype. Few rows of a long one are worked on at a
// time, so that the cache has what is read again.
template <int kTensors, class Body>
void with_twice_read_team(int64_t rows, int64_t length, bool whole, Dtype dtype, const char* op,
                          const Body& body) {
  constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1;
  const auto blocks = [&](int64_t wanted) { return unsigned(std::min(wanted, kMostBlocks)); };
  const auto choose = [&](auto held, auto again, const TwiceReadLaunch& launch) {
    if (!whole) return body(again, Any{}, launch);
    with_storage_type(dtype, [&](auto storage) { body(held, storage, launch); });
  };
  if (length <= kLongestHeldRow) {
    const RowBlock block(length);
    const int64_t all_threads = ceil_div(rows, block.teams) * block.threads;
    const int64_t rows_of_team = std::clamp<int64_t>(all_threads >> 20, 1, 4);
    const TwiceReadLaunch launch{blocks(ceil_div(rows, block.teams * rows_of_team)), block.threads,
                                 0};
    if (length <= kShortRow) return choose(RowTeam<true, true>{}, RowTeam<true, false>{}, launch);
    return choose(RowTeam<false, true>{}, RowTeam<false, false>{}, launch);
  }
  const DeviceLimits limits(op);
  TwiceReadLaunch launch{blocks(std::min<int64_t>(rows, limits.multiprocessors)),
                         LongRowTeam<true>::kMostThreads, 0};
  if (!whole) return body(LongRowTeam<false>{}, Any{}, launch);
  with_storage_type(dtype, [&](auto storage) {
    using T = decltype(storage);
    launch.shared_bytes = kSharedBytes<LongRowTeam<true>, T, kTensors>;
    // Beside a few hundred bytes that kernels use for sums.
    if (launch.shared_bytes + 2048 <= limits.shared_bytes) {
      return body(LongRowTeam<true>{}, storage, launch);
    }
    launch.shared_bytes = 0;
    body(LongRowTeam<false>{}, Any{}, launch);
  });
}

// Allows a kernel the shared memory of its launch.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, const TwiceReadLaunch& launch, const char* op) {
  if (launch.shared_bytes == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             launch.shared_bytes),
        op);
}

}  // namespace dsx::cuda
