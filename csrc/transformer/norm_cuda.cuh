// What the CUDA kernels of a norm share: the vectors beside a row, the walk over rows, and what a
// row is normalized by.
#pragma once

#include "common/cuda/check.h"
#include "common/cuda/twice_read.cuh"
#include "transformer/norm.h"

namespace dsx {

#include "transformer/norm_math.inl"

namespace cuda {

using Values = Floats<kRowVector>;

// What a thread has of a row beside those that are read twice: in registers, or to be read again
// each time.
template <class Team, class T, bool kHeld = (Team::kVectors > 0)>
struct HeldRow {
  Pointer<T> row;  // null: absent
  RowVector<T> vectors[kHeld ? Team::kVectors : 1];

  __device__ void fetch_all(int64_t length, bool aligned) {
    if constexpr (kHeld) {
      if (!row) return;
      for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
        vectors[v] = cuda::fetch(row, i, count, aligned);
      });
    }
  }

  __device__ Values get(int v, int64_t i, int count, bool aligned) const {
    if constexpr (kHeld) return floats_of(vectors[v]);
    return floats_of(cuda::fetch(row, i, count, aligned));
  }

  // With the offset, or ones.
  __device__ Values weight(float offset, int v, int64_t i, int count, bool aligned) const {
    return row ? get(v, i, count, aligned) + Values(offset) : Values(1.0f);
  }
};

// What each thread of a team can hold beside a row, its gradient and that of the weight.
template <class Team, class T>
constexpr bool kHasRoomFor = Team::kVectors > 0 && sizeof(RowVector<T>) == 16;

// A block takes `rows_of_team` rows with each of its teams: all of them take neighbours at a time,
// so that they find each other's memory near. Calls body(row, current, next, its number) with rows
// as row_at(number) gives them, of length 0 beyond the end, as all threads of a block must meet.
template <class Team, class RowAt, class Body>
__device__ void for_each_row(int rows_of_team, int64_t rows, const RowAt& row_at,
                             const Body& body) {
  int64_t row = int64_t(blockIdx.x) * rows_of_team * Team::kTeams + Team::team();
#pragma unroll 1
  for (int turn = 0; turn < rows_of_team; ++turn, row += Team::kTeams) {
    const int64_t ahead = turn + 1 < rows_of_team ? row + Team::kTeams : rows;
    auto current = row_at(row);
    body(row, current, row_at(ahead), ahead);
  }
}

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

// Finds them, for one row after the other. `Reader` is a TwiceRead; all threads of a block take
// part.
template <class Kind, class Team, class T, bool kGrads>
class Moments {
 public:
  // first_value_of(v, i, count, values) is what is normalized, called once for each vector, which
  // the reader has from then on, or reads in `row_again`; grad_of, with the same arguments, is its
  // gradient times the weight.
  template <class Reader, class FirstValue, class Grad>
  __device__ RowMoments of(Reader& reader, typename Reader::Row& row,
                           const typename Reader::Row& row_again, const typename Reader::Row& next,
                           float n, float eps, const FirstValue& first_value_of,
                           const Grad& grad_of) {
    RowMoments found = {};
    float squares = 0, dot = 0;
    if constexpr (Kind::kCentered) {
      float sum[1] = {};
      reader.first(row, next, [&](int v, int64_t i, int count, const auto& values) {
        sum[0] += sum_of_lanes(first_value_of(v, i, count, values));
      });
      add_over_team<Team>(sum, meeting_++);
      found.mean = sum[0] / n;
      row = row_again;
      float deviations = 0, grads = 0;
      reader.again(row, [&](int v, int64_t i, int count, const auto& values) {
        const Values value = first_lanes<T>(values[0] - Values(found.mean), count);
        deviations += sum_of_lanes(value);
        squares += sum_of_lanes(value * value);
        if constexpr (kGrads) {
          const Values grad = grad_of(v, i, count, values);
          grads += sum_of_lanes(grad);
          dot += sum_of_lanes(value * grad);
        }
      });
      float all[2 + 2 * kGrads] = {squares, deviations};
      if constexpr (kGrads) {
        all[2] = grads;
        all[3] = dot;
      }
      add_over_team<Team>(all, meeting_++);
      found.rest = all[1] / n;
      squares = squared_deviations(all[0], all[1], found.rest);
      if constexpr (kGrads) {
        found.grad_mean = all[2] / n;
        dot = all[3] - found.rest * all[2];
      }
    } else {
      reader.first(row, next, [&](int v, int64_t i, int count, const auto& values) {
        const Values value = first_value_of(v, i, count, values);
        squares += sum_of_lanes(value * value);
        if constexpr (kGrads) dot += sum_of_lanes(value * grad_of(v, i, count, values));
      });
      row = row_again;
      float all[1 + kGrads] = {squares};
      if constexpr (kGrads) all[1] = dot;
      add_over_team<Team>(all, meeting_++);
      squares = all[0];
      if constexpr (kGrads) dot = all[1];
    }
    found.inverse = inverse_rms(Floats<1>(squares), n, eps).lanes[0];
    const bool fits = squares_fit(found.inverse);
    if (Team::kShort ? __any_sync(0xffffffff, !fits) : !fits) {
      const float inverse = inverse_of_scaled(reader, row, n, eps, found);
      if (!fits) found.inverse = inverse;
    }
    if constexpr (kGrads) {
      found.share = rms_share(Floats<1>(dot), Floats<1>(found.inverse), n).lanes[0];
    }
    return found;
  }

 private:
  template <class Reader>
  __device__ float inverse_of_scaled(const Reader& reader, const typename Reader::Row& row, float n,
                                     float eps, const RowMoments& found) {
    const float scale = scale_of_squares(found.inverse);
    float sums[1] = {};
    reader.from_memory(row, [&](int64_t /*i*/, int count, const auto& values) {
      const Values value = found.deviation_of<Kind>(values[0]) * Values(scale);
      sums[0] += sum_of_lanes(first_lanes<T>(value * value, count));
    });
    add_over_team<Team>(sums, meeting_++);
    const float inverse = inverse_rms(Floats<1>(sums[0]), n, eps * scale * scale).lanes[0] * scale;
    const float most = inverse_rms(Floats<1>(0.0f), n, eps).lanes[0];  // when eps has vanished
    return inverse > most ? most : inverse;
  }

  int meeting_ = 0;  // of the team's threads
};

}  // namespace cuda
}  // namespace dsx
