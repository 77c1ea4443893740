// Elementwise kernels over rows: all vectors of all rows are one list, of which every thread takes
// two.
#pragma once

#include <algorithm>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

constexpr int kVectors = 2;  // of a thread: the loads of both are under way together
template <class T>
constexpr int kCount = std::is_same_v<T, float> ? 4 : 8;  // elements of a vector

// Where a vector is: `count` elements of a row from number i on; 0 beyond the last vector.
struct Place {
  int64_t row = 0, i = 0;
  int count = 0;
};

// The places of the vectors of this thread, a block apart.
template <class T>
__device__ inline Place place_of_vector(int64_t rows, int64_t length, int k) {
  const int64_t vectors = ceil_div(length, kCount<T>);  // of a row
  const int64_t v = (int64_t(blockIdx.x) * kVectors + k) * kThreads + threadIdx.x;
  Place place;
  if (rows > 1) {
    const bool fits = rows * vectors <= UINT32_MAX;  // in the far cheaper division
    place.row = fits ? int64_t(uint32_t(v) / uint32_t(vectors)) : v / vectors;
  }
  place.i = (v - place.row * vectors) * kCount<T>;
  if (v < rows * vectors) {
    place.count = int(::min(int64_t(kCount<T>), length - place.i));
  }
  return place;
}

template <class T>
using Vector = RowVector<T, kCount<T>>;

// What lies at a place, of rows that all have this storage type, or Any.
template <class T>
__device__ inline Vector<T> fetch_at(const Rows& rows, const Place& at, bool aligned) {
  return fetch<kCount<T>>(rows.row<T>(at.row), at.i, at.count, aligned);
}

// The vectors of this thread, of each of kTensors tensors, all of which are fetched before the
// first one is worked on. T is the storage type of all these, or Any.
template <class T, int kTensors>
class FetchedVectors {
 public:
  using Values = Floats<kCount<T>>;

  __device__ FetchedVectors(int64_t rows, int64_t length, const Rows* const (&tensors)[kTensors],
                            bool aligned) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Place& at = places_[k] = place_of_vector<T>(rows, length, k);
      if (at.count == 0) continue;
#pragma unroll
      for (int t = 0; t < kTensors; ++t) vectors_[k][t] = fetch_at<T>(*tensors[t], at, aligned);
    }
  }

  // Calls body(place, values) for each vector that is there, with an array of kTensors.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (places_[k].count == 0) continue;
      Values values[kTensors];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) values[t] = floats_of(vectors_[k][t]);
      body(places_[k], values);
    }
  }

 private:
  Place places_[kVectors];
  Vector<T> vectors_[kVectors][kTensors];
};

// Calls launch(storage, blocks, aligned): with a value of the storage type of all rows if nothing
// is in the way of whole vectors, else of Any.
template <class Launch>
void launch_over_list(int64_t rows, int64_t length, std::initializer_list<Rows> all, const char* op,
                      const Launch& launch) {
  cuda::check(cudaPeekAtLastError(), op);  // of somebody before
  const bool aligned = all_aligned(all);
  const Dtype first = all.begin()->dtype;
  const bool same =
      std::all_of(all.begin(), all.end(), [&](const Rows& each) { return each.dtype == first; });
  const auto launch_with = [&](auto storage) {
    const int64_t vectors = rows * ceil_div(length, kCount<decltype(storage)>);
    launch(storage, unsigned(ceil_div(vectors, kVectors * kThreads)), aligned);
  };
  if (aligned && same && length % 8 == 0) {
    with_storage_type(first, launch_with);
  } else {
    launch_with(Any{});
  }
  cuda::check(cudaGetLastError(), op);
}

}  // namespace dsx::cuda
