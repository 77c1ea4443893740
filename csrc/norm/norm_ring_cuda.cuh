// Norms of rows that pass through a ring.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// The threads of a cluster that compute take a row together. Sums of parts are added in their
// order.
template <class T, int kTensors>
struct RingTeam {
  using Ring = RowRing<T, kTensors>;
  static constexpr RowLength kLength = RowLength::in_parts;
  static constexpr bool kShort = false, kRing = true;

  const Ring& ring;
  mutable RingExchange<Ring> exchange;

  __device__ explicit RingTeam(const Ring& of) : ring(of), exchange(of) {}
};

template <class Team, int kSums>
class RingReduction {
 public:
  __device__ RingReduction(const Team& team, float*) : team_(team) {}

  __device__ void put(int part, const float (&sums)[kSums]) const {
    const float mine = sums_over_lanes<kWarp>(sums);
    if (lane() < kSums) team_.exchange.of_warps(part)[warp() * kSums + lane()] = mine;
  }
  __device__ void take(float (&sums)[kSums]) const {
    team_.ring.barrier();
    for (int part = warp(); part < team_.ring.parts; part += team_.ring.threads / kWarp) {
      const bool is_one = lane() < team_.ring.threads / kWarp;
      const float* of_warps = team_.exchange.of_warps(part);
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] = is_one ? of_warps[lane() * kSums + s] : 0.0f;
      team_.exchange.template tell<kSums>(part, sums_over_lanes<kWarp>(sums));
    }
    const auto all = team_.exchange.template gather<kSums>();
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = 0;
    for (int part = 0; part < team_.ring.shape.parts; ++part) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] += all[part][s];
    }
  }
  __device__ static bool any(bool is_so) { return is_so; }

 private:
  __device__ static int lane() { return int(threadIdx.x) % kWarp; }
  __device__ static int warp() { return int(threadIdx.x) / kWarp; }

  const Team& team_;
};

template <class T, int kTensors, int kSums>
struct ReductionOf<RingTeam<T, kTensors>, kSums> {
  using type = RingReduction<RingTeam<T, kTensors>, kSums>;
};

// What a block has of a row, as Moments reads it, part by part.
template <class T, int kTensors>
struct RingRow {
  using Ring = RowRing<T, kTensors>;
  const Ring& ring;
  typename Ring::Place place;  // of the first part

  struct Part {
    const Ring& ring;
    typename Ring::Place place;
    int count;

    template <class Body>
    __device__ void for_each_vector(const Body& body) const {
#pragma unroll
      for (int v = 0; v < kVectorsOfPart; ++v) {
        const int i = (v * ring.threads + int(threadIdx.x)) * kRowVector;
        if (i >= count) continue;
        RowVector<T> vectors[kTensors];
#pragma unroll
        for (int t = 0; t < kTensors; ++t) vectors[t] = ring.vector(place.slot, t, i);
        body(i, kRowVector, vectors);
      }
    }
  };

  __device__ int parts() const { return ring.parts; }
  // Waits until it is there.
  __device__ Part part(int number) const {
    typename Ring::Place there = place;
    ring.advance(there, number);
    ring.wait(there);
    return {ring, there, ring.count(number)};
  }
  __device__ float near() const {
    ring.wait(place);
    return sum_of_lanes(floats_of(ring.first_vector(place))) / kRowVector;
  }
};

}  // namespace dsx::cuda
