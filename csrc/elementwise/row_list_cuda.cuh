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

// How a list is spread. The vectors of a thread are at one place of two rows, so that a bias is
// read once for both; of an only row without a bias at two places.
struct ListLaunch {
  unsigned blocks;
  int threads;
  bool by_rows;
  int64_t steps;  // rows, or elements, from one vector of a thread to the next

  // A short list is spread over more multiprocessors.
  ListLaunch(int64_t rows, int64_t length, int of_vector, bool has_bias) {
    const int64_t vectors = ceil_div(length, of_vector);
    const bool is_short = rows * vectors <= 1 << 18;
    const int each = is_short ? 1 : kVectors;
    by_rows = rows > 1 || has_bias;
    threads = is_short ? kThreads / 2 : kThreads;
    const int64_t groups = by_rows ? ceil_div(rows, each) : 1;
    blocks = unsigned(ceil_div(by_rows ? groups * vectors : ceil_div(vectors, each), threads));
    steps = by_rows ? groups : int64_t(blocks) * threads * of_vector;
  }
};

struct ListPlace {  // of a thread
  int64_t row = 0, i, row_step = 0, step = 0;

  __device__ ListPlace(const ListLaunch& list, int64_t length, int of_vector) {
    int64_t v = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (list.by_rows) {
      const int64_t vectors = ceil_div(length, of_vector);
      row = quotient(v, vectors);
      v -= row * vectors;
      row_step = list.steps;
      if (row >= list.steps) row = INT64_MAX / 2;  // a thread too many: beyond all rows
    } else {
      step = list.steps;
    }
    i = v * of_vector;
  }

  __device__ VectorIndex index(int k, int64_t rows, int64_t length, int of_vector) const {
    VectorIndex at{row + k * row_step, i + k * step, 0};
    if (at.row < rows && at.i < length) at.count = int(::min(int64_t(of_vector), length - at.i));
    return at;
  }
};

template <class T>
using Vector = RowVector<T, kCount<T>>;

// Only of Any may rows be in groups.
template <class T>
__device__ inline Pointer<T> row_of(const Rows& rows, int64_t row) {
  if constexpr (std::is_same_v<T, Any>) return rows.row<T>(row);
  return rows.even_row<T>(row);
}

// A vector of rows that all have this storage type, or Any.
template <class T>
__device__ inline Vector<T> fetch_at(const Rows& rows, const VectorIndex& at, bool aligned) {
  return fetch<kCount<T>>(row_of<T>(rows, at.row), at.i, at.count, aligned);
}

// Calls launch(storage, ListLaunch, aligned): with a value of the storage type of all rows if
// nothing is in the way of whole vectors, and none are in groups; else of Any.
template <class Launch>
void launch_over_list(int64_t rows, int64_t length, std::span<const Rows> all, bool has_bias,
                      const char* op, const Launch& launch) {
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const bool aligned = all_aligned(all);
  const Dtype first = all.begin()->dtype;
  const bool same = std::all_of(all.begin(), all.end(), [&](const Rows& each) {
    return each.dtype == first && each.group == 0;
  });
  const auto launch_with = [&](auto storage) {
    launch(storage, ListLaunch(rows, length, kCount<decltype(storage)>, has_bias), aligned);
  };
  if (aligned && same && length % 8 == 0) {
    with_storage_type(first, launch_with);
  } else {
    launch_with(Any{});
  }
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx::cuda
