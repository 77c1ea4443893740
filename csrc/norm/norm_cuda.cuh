// What the CUDA kernels of a norm share: the threads that take a row together, a thread's part of a
// row, and what a row is normalized by. Which thread has which elements depends on the length of
// the row only, and so do all sums over it.
#pragma once

#include "common/cuda/check.h"
#include "common/cuda/row_parts.cuh"
#include "common/cuda/rows.cuh"
#include "norm/norm.h"

namespace dsx {

#include "common/inverse_rms_math.inl"
#include "norm/norm_math.inl"

namespace cuda {

using RowFloats = Floats<kRowVector>;  // of a RowVector

// Half a warp takes a row of up to 128 elements, a warp one of up to 1,024; a team of warps, in
// which each thread has four vectors, one of up to 16,384; 1,024 threads a longer one. Such a team
// takes each part of a row that is_in_parts, backward, and forward where all is of bfloat16 and
// there is no residual. The vectors of a thread lie as far apart as all threads of the team reach.
// Held rows stay in registers, and long ones in shared memory too, where whole vectors can be read
// and there is memory; else they are read again each time, with the same bits.
enum class RowLength { is_short, is_of_warp, is_usual, is_long, in_parts };
constexpr int kHeldVectors = 4, kMostOfTeam = 512, kLongTeam = 1024;
constexpr int64_t kRowOfWarp = kWarp * kHeldVectors * kRowVector;
constexpr int64_t kUsualRow = kMostOfTeam * kHeldVectors * kRowVector;

inline int threads_of_team(int64_t length) {
  if (length > kUsualRow) return kLongTeam;
  if (length <= kShortRow) return kWarp / 2;
  return int(ceil_div(length, kRowOfWarp)) * kWarp;
}

// Whether the blocks of a cluster can have the parts of a long row. Of float32 too few fit into
// their shared memory, and those of float16 are rare.
inline bool is_in_parts(int64_t length, Dtype dtype) {
  static_assert(kUsualRow == kMostOfPart && kHeldVectors == kVectorsOfPart);
  return dtype == Dtype::bfloat16 && length > kUsualRow && parts_of(length) <= kMostParts;
}

// What is multiplied by, of a weight that is there. Without an offset, one of 0 keeps its sign.
__device__ inline RowFloats with_offset(const RowFloats& weight, float offset) {
  return offset != 0 ? weight + RowFloats(offset) : weight;
}

// Of a block, or one of its teams: these have barriers of their own, of which a multiprocessor has
// few, but where they are warps. kVectors: of a thread, but of long rows.
template <RowLength kLength_, bool kAlone = true, int kVectors_ = kHeldVectors>
struct RowTeam {
  static constexpr RowLength kLength = kLength_;
  static constexpr bool kShort = kLength == RowLength::is_short;
  static constexpr bool kParts = false;  // others have parts of the row
  static constexpr int kVectors = kShort ? 1 : kVectors_;
  // Threads, where their number is known.
  static constexpr int kFixed = kShort ? kWarp / 2 : kLength == RowLength::is_of_warp ? kWarp : 0;
  static constexpr int kMostThreads = kLength == RowLength::is_long ? kLongTeam : kMostOfTeam;

  int threads, thread, number;  // of the team in its block

  // `size`: threads_of_team, which a block has several times.
  __device__ explicit RowTeam(int size)
      : threads(kFixed > 0 ? kFixed : size),
        thread(int(threadIdx.x) % threads),
        number(int(threadIdx.x) / threads) {}

  __device__ int64_t row() const {
    return int64_t(blockIdx.x) * (int(blockDim.x) / threads) + number;
  }

  // Sums over what this team has of a row become those over all of it.
  template <int kSums>
  __device__ void add_over_parts(float (&)[kSums]) const {}

  __device__ void barrier() const {
    if constexpr (kAlone) {
      __syncthreads();
    } else {
      asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "r"(threads) : "memory");
    }
  }
};

// Where a thread's vectors of a row are.
template <class T>
using Column = std::conditional_t<std::is_same_v<T, Any>, int64_t, int>;
template <class T>
__device__ inline int count_at(Column<T> i, Column<T> length) {
  if constexpr (!std::is_same_v<T, Any>) return kRowVector;
  return int(::min(Column<T>(kRowVector), length - i));
}

// The mean of the first few elements of a row, which all threads read. 0 if it is absent.
template <class T>
__device__ inline float mean_of_first(Pointer<T> row, int64_t length, bool aligned) {
  if (length == 0 || !row) return 0;
  const int count = count_at<T>(0, Column<T>(length));
  return sum_of_lanes(floats_of(fetch(row, 0, count, aligned))) / float(count);
}

// A thread's part of one row of kTensors tensors, in registers.
template <class Team, class T, int kTensors>
struct HeldRow {
  const Team& team;
  int length;  // 0: there is no such row
  RowVector<T> vectors[Team::kVectors][kTensors];

  __device__ void fetch_all(const Pointer<T> (&tensors)[kTensors]) {
    for_each([&](int v, int i, int) {
#pragma unroll
      for (int t = 0; t < kTensors; ++t) vectors[v][t] = fetch(tensors[t], i, kRowVector, true);
    });
  }

  // Calls body(v, i, count) for each vector: number v, from element i on.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll
    for (int v = 0; v < Team::kVectors; ++v) {
      const int i = (v * team.threads + team.thread) * kRowVector;
      if (i < length) body(v, i, kRowVector);
    }
  }

  // Calls body(i, count, vectors), with one vector of each tensor.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    for_each([&](int v, int i, int count) { body(i, count, vectors[v]); });
  }
};

// The same of a row that is read again each time, a few vectors at once: elements [begin, length).
template <class Team, class T, int kTensors>
struct ReadRow {
  static constexpr int kBatch = std::is_same_v<T, Any> ? 1 : 8 / int(sizeof(T));

  const Team& team;
  int64_t length;
  bool aligned;
  Pointer<T> tensors[kTensors];  // all but the first may be absent
  int64_t begin = 0;

  // The part of a row that is in parts from element `from` on, of so many elements if they are all.
  __device__ ReadRow part(int64_t from, int64_t elements) const {
    ReadRow row = *this;
    row.begin = from;
    row.length = ::min(length, from + elements);
    return row;
  }

  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    const Column<T> end = Column<T>(length), stride = Column<T>(team.threads) * kRowVector;
#pragma unroll 1
    for (Column<T> first = Column<T>(begin) + team.thread * kRowVector; first < end;
         first += kBatch * stride) {
      RowVector<T> vectors[kBatch][kTensors];
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        const Column<T> i = first + v * stride;
        if (i >= end) continue;
#pragma unroll
        for (int t = 0; t < kTensors; ++t) {
          if (t > 0 && !tensors[t]) continue;
          vectors[v][t] = fetch(tensors[t], i, count_at<T>(i, end), aligned);
        }
      }
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        const Column<T> i = first + v * stride;
        if (i < end) body(i, count_at<T>(i, end), vectors[v]);
      }
    }
  }
};

// What a row has for its elements to be normalized by, and for their gradients. Every thread of the
// team has the same.
struct OfMean {
  float mean = 0, rest = 0;  // as RowMean says
  float grad_mean = 0;       // of the weighted gradients
};
struct OfNoMean {};
template <class Kind>
struct RowMoments : std::conditional_t<Kind::kCentered, OfMean, OfNoMean> {
  float inverse = 0;  // of the rms
  float share = 0;    // as rms_share says

  __device__ RowFloats deviation_of(const RowFloats& x) const {
    if constexpr (Kind::kCentered) {
      return deviation(x, RowFloats(this->mean), RowFloats(this->rest));
    } else {
      return x;
    }
  }
  __device__ RowFloats standardized_of(const RowFloats& x) const {
    if constexpr (Kind::kCentered) {
      return standardized(x, RowFloats(inverse), RowFloats(this->mean),
                          RowFloats(-this->rest * inverse));
    } else {
      return standardized(x, RowFloats(inverse));
    }
  }

  // The gradient of what was normalized.
  __device__ RowFloats gradient(const RowFloats& standard, const RowFloats& grad,
                                const RowFloats& weight) const {
    const RowFloats weighted = grad * weight;
    if constexpr (Kind::kCentered) {
      return grad_of_x(standard, weighted, RowFloats(inverse), RowFloats(share),
                       RowFloats(this->grad_mean * inverse));
    } else {
      return grad_of_x(standard, weighted, RowFloats(inverse), RowFloats(share));
    }
  }
};

// A sum in two lanes, each product rounded with it.
struct LaneSum {
  float lanes[2] = {};

  __device__ void add(const RowFloats& a) {
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) lanes[k % 2] += a.lanes[k];
  }
  __device__ void add_products(const RowFloats& a, const RowFloats& b) {
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) {
      lanes[k % 2] = __fmaf_rn(a.lanes[k], b.lanes[k], lanes[k % 2]);
    }
  }
  __device__ float total() const { return lanes[0] + lanes[1]; }
};

// Each sum over so many lanes; a lane gets sum number lane % kSums: neighbours add up different
// ones.
__device__ inline float exchanged(float a, float b, bool second, int distance) {
  return (second ? b : a) + __shfl_xor_sync(~0u, second ? a : b, distance);
}
template <int kLanes, int kSums>
__device__ inline float sums_over_lanes(const float (&sums)[kSums]) {
  const int lane = int(threadIdx.x) % kWarp;
  float sum = sums[0];
  if constexpr (kSums == 2) sum = exchanged(sums[0], sums[1], lane & 1, 1);
  if constexpr (kSums == 4) {
    const float low = exchanged(sums[0], sums[1], lane & 1, 1);
    const float high = exchanged(sums[2], sums[3], lane & 1, 1);
    sum = exchanged(low, high, lane & 2, 2);
  }
#pragma unroll
  for (int distance = kSums; distance < kLanes; distance *= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return sum;
}

// Whether teams add up without memory, and without a barrier.
template <class Team>
constexpr bool kIsInWarp = Team::kShort || Team::kLength == RowLength::is_of_warp;

// Adds up 1, 2 or 4 numbers over the threads of a team. Each warp puts down its sums; behind a
// barrier, every thread takes the totals. All threads of the warps of a team take part.
template <class Team, int kSums>
class TeamReduction {
 public:
  // `memory` holds kReductionFloats for the teams of a block.
  __device__ TeamReduction(const Team& team, float* memory)
      : team_(team), memory_(memory + team.number * (team.threads / kWarp) * kSums) {}

  __device__ void put(const float (&sums)[kSums]) {
    mine_ = over_lanes(sums);
    if (kIsInWarp<Team> || team_.threads == kWarp) return;
    const int lane = int(threadIdx.x) % kWarp;
    if (lane < kSums) memory_[(buffer_ * kWarp + team_.thread / kWarp) * kSums + lane] = mine_;
  }

  // Two buffers, one after the other: nobody writes to one before all have read it and come to the
  // barrier of the other.
  __device__ void take(float (&sums)[kSums]) {
    if (!kIsInWarp<Team> && team_.threads > kWarp) {
      team_.barrier();
      const int lane = int(threadIdx.x) % kWarp;
      const bool is_one = lane < team_.threads / kWarp;
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        sums[s] = is_one ? memory_[(buffer_ * kWarp + lane) * kSums + s] : 0.0f;
      }
      mine_ = over_lanes(sums);
      buffer_ ^= 1;
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = __shfl_sync(~0u, mine_, s, kLanes);
    team_.add_over_parts(sums);
  }

  // Whether it is so in one of the teams of a warp.
  __device__ static bool any(bool is_so) { return Team::kShort ? __any_sync(~0u, is_so) : is_so; }

 private:
  static constexpr int kLanes = Team::kShort ? kWarp / 2 : kWarp;

  __device__ static float over_lanes(const float (&sums)[kSums]) {
    return sums_over_lanes<kLanes>(sums);
  }

  const Team& team_;
  float* memory_;
  float mine_ = 0;
  int buffer_ = 0;
};

// How a team adds up; other kinds of teams have other ways.
template <class Team, int kSums>
struct ReductionOf {
  using type = TeamReduction<Team, kSums>;
};

// Finds the moments of one row after the other. What is normalized is the first tensor of a row;
// grad_of(i, vectors) is the gradient of the result, times the weight. `near` is some number near
// the values, which is taken away from them before they are added up: in layer normalization one
// barrier of the threads is enough then.
template <class Kind, class Team, class T, bool kGrads>
class Moments {
 public:
  static constexpr int kSums = (1 + kGrads) * (1 + Kind::kCentered);

  __device__ Moments(const Team& team, float* memory) : reduction_(team, memory) {}

  // First this, then for the same row `find`.
  template <class Row, class Grad>
  __device__ void put(const Row& row, float near, const Grad& grad_of) {
    put_parts(row, [&](const auto& part) {
      LaneSum squares;
      [[maybe_unused]] LaneSum values, dot, grads;
      part.for_each_vector([&](auto i, int count, const auto& vectors) {
        RowFloats value = floats_of(vectors[0]);
        if constexpr (Kind::kCentered) value = first_lanes<T>(value - RowFloats(near), count);
        squares.add_products(value, value);
        if constexpr (Kind::kCentered) values.add(value);
        if constexpr (kGrads) {
          const RowFloats grad = grad_of(i, vectors);
          dot.add_products(value, grad);
          if constexpr (Kind::kCentered) grads.add(grad);
        }
      });
      Sums all{squares.total()};
      if constexpr (kGrads) all.sums[1] = dot.total();
      if constexpr (Kind::kCentered) all.sums[1 + kGrads] = values.total();
      if constexpr (Kind::kCentered && kGrads) all.sums[3] = grads.total();
      return all;
    });
  }

  template <class Row, class Grad>
  __device__ RowMoments<Kind> find(const Row& row, float near, float inverse_n, float eps,
                                   const Grad& grad_of) {
    RowMoments<Kind> found;
    NormSums sums = take();
    if constexpr (Kind::kCentered) {
      const bool are_far = sums.are_far(inverse_n);
      if (reduction_.any(are_far)) {
        const float nearer = near + sums.values * inverse_n;
        put(row, nearer, grad_of);
        const NormSums around = take();
        if (are_far) {
          sums = around;
          near = nearer;
        }
      }
      const float shift = sums.values * inverse_n;
      const RowMean mean(near, shift);
      found.mean = mean.mean;
      found.rest = mean.rest;
      found.grad_mean = sums.grads * inverse_n;
      sums.dot -= shift * sums.grads;
      sums.squares = sums.squared_deviations(inverse_n);
    }
    found.inverse = inverse_rms(Floats<1>(sums.squares), inverse_n, eps).lanes[0];
    const bool fits = squares_fit(found.inverse);
    if (reduction_.any(!fits)) {
      const float inverse = inverse_of_scaled(row, inverse_n, eps, found);
      if (!fits) found.inverse = inverse;
    }
    if constexpr (kGrads) {
      found.share = rms_share(Floats<1>(sums.dot), Floats<1>(found.inverse), inverse_n).lanes[0];
    }
    return found;
  }

 private:
  struct Sums {
    float sums[kSums];
  };
  static constexpr bool kInParts = Team::kLength == RowLength::in_parts;

  // Puts down what sums_of says of a row; of a long one, part by part.
  template <class Row, class SumsOf>
  __device__ void put_parts(const Row& row, const SumsOf& sums_of) {
    if constexpr (kInParts) {
      before_ = {};
      const int64_t elements = int64_t(row.team.threads) * kPartOfThread;
#pragma unroll 1
      for (int64_t from = 0; from < row.length; from += elements) {
        reduction_.put(sums_of(row.part(from, elements)).sums);
        if (from + elements < row.length) before_ = take_all();
      }
    } else {
      reduction_.put(sums_of(row).sums);
    }
  }
  __device__ Sums take_all() {
    Sums all;
    reduction_.take(all.sums);
    if constexpr (kInParts) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) all.sums[s] = before_.sums[s] + all.sums[s];
    }
    return all;
  }

  __device__ NormSums take() {
    const Sums all = take_all();
    NormSums found;
    found.squares = all.sums[0];
    if constexpr (kGrads) found.dot = all.sums[1];
    if constexpr (Kind::kCentered) found.values = all.sums[1 + kGrads];
    if constexpr (Kind::kCentered && kGrads) found.grads = all.sums[3];
    return found;
  }

  template <class Row>
  __device__ float inverse_of_scaled(const Row& row, float inverse_n, float eps,
                                     const RowMoments<Kind>& found) {
    const float scale = scale_of_squares(found.inverse);
    put_parts(row, [&](const auto& part) {
      LaneSum squares;
      part.for_each_vector([&](auto, int count, const auto& vectors) {
        RowFloats value = found.deviation_of(floats_of(vectors[0])) * RowFloats(scale);
        value = first_lanes<T>(value, count);
        squares.add_products(value, value);
      });
      return Sums{squares.total()};
    });
    const float sum = take_all().sums[0];
    const float inverse =
        inverse_rms(Floats<1>(sum), inverse_n, eps * scale * scale).lanes[0] * scale;
    const float most =
        inverse_rms(Floats<1>(0.0f), inverse_n, eps).lanes[0];  // when eps has vanished
    return inverse > most ? most : inverse;
  }

  typename ReductionOf<Team, kSums>::type reduction_;
  Sums before_;  // of parts
};

// What the teams of a block need in shared memory to add up.
template <class Kind, class Team, bool kGrads>
constexpr int kReductionFloats =
    kIsInWarp<Team> ? 1 : 2 * kWarp * (1 + kGrads) * (1 + Kind::kCentered);

}  // namespace cuda
}  // namespace dsx
