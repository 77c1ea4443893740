// Elementwise kernels over rows: all vectors of all rows are one list, of which every thread takes
// two, or one of a short list.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

constexpr int kVectors = 2;  // of a thread: the loads of both are under way together
template <class T>
constexpr int kCount = std::is_same_v<T, float> ? 4 : 8;  // elements of a vector

// Where a vector is: `count` elements of a row from number i on; 0 beyond the last vector.
struct VectorIndex {
  int64_t row = 0, i = 0;
  int count = 0;
};

// The vectors of this thread, as far apart as all threads reach.
template <class T>
__device__ inline VectorIndex index_of_vector(int64_t rows, int64_t length, int k) {
  const int64_t vectors = ceil_div(length, kCount<T>);  // of a row
  const int64_t v = (int64_t(k) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  VectorIndex index;
  if (rows > 1) {
    const bool fits = rows * vectors <= UINT32_MAX;  // in the far cheaper division
    index.row = fits ? int64_t(uint32_t(v) / uint32_t(vectors)) : v / vectors;
  }
  index.i = (v - index.row * vectors) * kCount<T>;
  if (v < rows * vectors) {
    index.count = int(::min(int64_t(kCount<T>), length - index.i));
  }
  return index;
}

template <class T>
using Vector = RowVector<T, kCount<T>>;

// A vector of rows that all have this storage type, or Any.
template <class T>
__device__ inline Vector<T> fetch_at(const Rows& rows, const VectorIndex& at, bool aligned) {
  return fetch<kCount<T>>(rows.row<T>(at.row), at.i, at.count, aligned);
}

struct ListLaunch {
  unsigned blocks;
  int threads;

  // A short list is spread over more multiprocessors.
  explicit ListLaunch(int64_t vectors) {
    const bool is_short = vectors <= 1 << 18;
    threads = is_short ? kThreads / 2 : kThreads;
    blocks = unsigned(ceil_div(vectors, (is_short ? 1 : kVectors) * threads));
  }
};

// Calls launch(storage, ListLaunch, aligned): with a value of the storage type of all rows if
// nothing is in the way of whole vectors, else of Any.
template <class Launch>
void launch_over_list(int64_t rows, int64_t length, std::span<const Rows> all, const char* op,
                      const Launch& launch) {
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const bool aligned = all_aligned(all);
  const Dtype first = all.begin()->dtype;
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const Rows& each) { return each.dtype == first; });
  const auto launch_with = [&](auto storage) {
    launch(storage, ListLaunch(rows * ceil_div(length, kCount<decltype(storage)>)), aligned);
  };
  if (aligned && same && length % 8 == 0) {
    with_storage_type(first, launch_with);
  } else {
    launch_with(Any{});
  }
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx::cuda
