// What the CUDA kernels of a norm share: a thread's part of a row, and what a row is normalized by.
#pragma once

#include "common/cuda/check.h"
#include "common/cuda/rows.cuh"
#include "transformer/norm.h"

namespace dsx {

#include "transformer/norm_math.inl"

namespace cuda {

using Values = Floats<kRowVector>;

// A thread's part of one row of kTensors tensors, of which all but the first may be absent: in
// registers, or to be read again each time, a few vectors at once.
template <class Team, class T, int kTensors>
struct RowPart {
  static constexpr bool kHeld = Team::kVectors > 0;
  static constexpr int kBatch = std::is_same_v<T, Any> ? 1 : 4;

  Pointer<T> tensors[kTensors];
  int64_t length;  // 0: there is no such row
  bool aligned;
  RowVector<T> held[kHeld ? Team::kVectors : 1][kTensors];

  __device__ void fetch_all() {
    if constexpr (kHeld) {
      for_each_row_vector<Team>(
          length, [&](int v, int64_t i, int count) { fetch_vectors(held[v], i, count); });
    }
  }

  // Calls body(v, i, count, vectors), with one vector of each tensor; what it writes to them is
  // kept if they are held.
  template <class Body>
  __device__ void for_each(const Body& body) {
    if constexpr (kHeld) {
      for_each_row_vector<Team>(length,
                                [&](int v, int64_t i, int count) { body(v, i, count, held[v]); });
    } else {
      const int64_t stride = Team::threads() * kRowVector;
#pragma unroll 1
      for (int64_t first = Team::thread() * kRowVector; first < length; first += kBatch * stride) {
        RowVector<T> vectors[kBatch][kTensors];
#pragma unroll
        for (int v = 0; v < kBatch; ++v) {
          const int64_t i = first + v * stride;
          if (i < length) fetch_vectors(vectors[v], i, count_at(i));
        }
#pragma unroll
        for (int v = 0; v < kBatch; ++v) {
          const int64_t i = first + v * stride;
          if (i < length) body(v, i, count_at(i), vectors[v]);
        }
      }
    }
  }

  // The mean of the first few elements, which all threads read; the sum of those of both tensors.
  __device__ float mean_of_first() const {
    float sum = 0;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) sum += mean_of_first_of(t);
    return sum;
  }
  __device__ float mean_of_first_of(int t) const {
    if (length == 0 || !tensors[t]) return 0;
    const int count = count_at(0);
    return sum_of_lanes(floats_of(fetch(tensors[t], 0, count, aligned))) / float(count);
  }

 private:
  __device__ int count_at(int64_t i) const { return int(::min(int64_t(kRowVector), length - i)); }
  __device__ void fetch_vectors(RowVector<T> (&vectors)[kTensors], int64_t i, int count) const {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      if (t == 0 || tensors[t]) vectors[t] = fetch(tensors[t], i, count, aligned);
    }
  }
};

// What a row has for its elements to be normalized by, and for their gradients; of layer
// normalization alone, but for the last two. Every thread of the team has the same.
struct RowMoments {
  float mean, rest;  // 0
  float grad_mean;   // 0; of the weighted gradients
  float inverse;     // of the rms
  float share;       // as rms_share says

  template <class Kind>
  __device__ Values deviation_of(const Values& x) const {
    if constexpr (!Kind::kCentered) return x;
    return deviation(x, Values(mean), Values(rest));
  }
};

// A sum in two lanes, each product rounded with it.
struct LaneSum {
  float lanes[2] = {};

  __device__ void add(const Values& a) {
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) lanes[k % 2] += a.lanes[k];
  }
  __device__ void add_products(const Values& a, const Values& b) {
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) {
      lanes[k % 2] = __fmaf_rn(a.lanes[k], b.lanes[k], lanes[k % 2]);
    }
  }
  __device__ float total() const { return lanes[0] + lanes[1]; }
};

// Finds the moments of one row after the other; all threads of a block take part.
template <class Kind, class Team, class T, bool kGrads>
class Moments {
 public:
  // What is normalized is the first vector; grad_of(v, i, count, vectors) is the gradient of the
  // result, times the weight. `near` is some number near the values, which is taken away from them
  // before they are added up: in layer normalization one meeting of the threads is enough then.
  template <class Row, class Grad>
  __device__ RowMoments of(Row& row, float near, float n, float eps, const Grad& grad_of) {
    RowMoments found = {};
    Sums sums;
    float nearer = near;
    bool is_far = true;
#pragma unroll 1
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Sums around = add_up(row, nearer, grad_of);
      if (is_far) {
        sums = around;
        near = nearer;
      }
      if (!Kind::kCentered) break;
      // So far from the mean that too little was left of the squares.
      is_far = sums.values * (sums.values / n) > 4 * sums.squares_around(n);
      if (!any_of_meeting(is_far)) break;
      nearer = near + sums.values / n;
    }
    if constexpr (Kind::kCentered) {
      const float shift = sums.values / n;
      found.mean = near + shift;
      const float moved = found.mean - near;  // the sum's rounding error: Knuth, TAOCP 2, 4.2.2
      found.rest = (near - (found.mean - moved)) + (shift - moved);
      found.grad_mean = sums.grads / n;
      sums.dot -= shift * sums.grads;
      sums.squares = sums.squares_around(n);
    }
    found.inverse = inverse_rms(Floats<1>(sums.squares), n, eps).lanes[0];
    const bool fits = squares_fit(found.inverse);
    if (any_of_meeting(!fits)) {
      const float inverse = inverse_of_scaled(row, n, eps, found);
      if (!fits) found.inverse = inverse;
    }
    if constexpr (kGrads) {
      found.share = rms_share(Floats<1>(sums.dot), Floats<1>(found.inverse), n).lanes[0];
    }
    return found;
  }

 private:
  // Over the row: values, their squares, and with gradients their products and those themselves.
  struct Sums {
    float squares = 0, values = 0, dot = 0, grads = 0;

    __device__ float squares_around(float n) const {
      return squared_deviations(squares, values, values / n);
    }
  };

  template <class Row, class Grad>
  __device__ Sums add_up(Row& row, float near, const Grad& grad_of) {
    LaneSum squares, values, dot, grads;
    row.for_each([&](int v, int64_t i, int count, auto& vectors) {
      Values value = floats_of(vectors[0]);
      if constexpr (Kind::kCentered) value = first_lanes<T>(value - Values(near), count);
      squares.add_products(value, value);
      if constexpr (Kind::kCentered) values.add(value);
      if constexpr (kGrads) {
        const Values grad = grad_of(v, i, count, vectors);
        dot.add_products(value, grad);
        if constexpr (Kind::kCentered) grads.add(grad);
      }
    });
    float all[(1 + kGrads) * (1 + Kind::kCentered)] = {squares.total()};
    if constexpr (kGrads) all[1] = dot.total();
    if constexpr (Kind::kCentered) all[1 + kGrads] = values.total();
    if constexpr (Kind::kCentered && kGrads) all[3] = grads.total();
    add_over_team<Team>(all, meeting_++);
    Sums found;
    found.squares = all[0];
    if constexpr (kGrads) found.dot = all[1];
    if constexpr (Kind::kCentered) found.values = all[1 + kGrads];
    if constexpr (Kind::kCentered && kGrads) found.grads = all[3];
    return found;
  }

  // Whether it is so in one of the teams that meet.
  __device__ static bool any_of_meeting(bool is_so) {
    return Team::kShort ? __any_sync(0xffffffff, is_so) : is_so;
  }

  template <class Row>
  __device__ float inverse_of_scaled(Row& row, float n, float eps, const RowMoments& found) {
    const float scale = scale_of_squares(found.inverse);
    LaneSum squares;
    row.for_each([&](int, int64_t, int count, auto& vectors) {
      Values value = found.deviation_of<Kind>(floats_of(vectors[0])) * Values(scale);
      value = first_lanes<T>(value, count);
      squares.add_products(value, value);
    });
    float sums[1] = {squares.total()};
    add_over_team<Team>(sums, meeting_++);
    const float inverse = inverse_rms(Floats<1>(sums[0]), n, eps * scale * scale).lanes[0] * scale;
    const float most = inverse_rms(Floats<1>(0.0f), n, eps).lanes[0];  // when eps has vanished
    return inverse > most ? most : inverse;
  }

  int meeting_ = 0;  // of the team's threads
};

}  // namespace cuda
}  // namespace dsx
