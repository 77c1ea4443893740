// Norms of rows that pass through a ring.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// The threads of a cluster that compute take a row together. Sums of parts are added in their
// order. The first sums of some rows are put down before those of the first of them are taken; sums
// that are taken once more for a row are put down and taken at once, in buffers of their own.
template <class T, int kTensors>
struct RingTeam {
  using Ring = RowRing<T, kTensors>;
  static constexpr RowLength kLength = RowLength::in_parts;
  static constexpr bool kShort = false, kRing = true;

  const Ring& ring;
  mutable UsualTurn to_put = {}, to_take = {};
  mutable AgainTurn once_more = {};
  mutable bool again = false;  // the first sums of the row have been taken

  __device__ explicit RingTeam(const Ring& of) : ring(of) {}
};

template <class Team, int kSums>
class RingReduction {
 public:
  __device__ RingReduction(const Team& team, float*) : team_(team) {}

  __device__ void put(int part, const float (&sums)[kSums]) const {
    const float mine = sums_over_lanes<kWarp>(sums);
    const int buffer = team_.again ? team_.once_more.buffer : team_.to_put.buffer;
    if (lane() < kSums) memory().of_warps[buffer][part][warp() * kSums + lane()] = mine;
  }
  // All parts of a row have been put.
  __device__ void end_row() const {
    if (team_.again) return;
    show_sums(team_.ring, team_.to_put.buffer);
    team_.to_put.advance();
  }
  __device__ void take(float (&sums)[kSums]) const {
    if (!team_.again) {
      const float* const totals = wait_for_totals(team_.ring, team_.to_take);
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] = totals[s];
      team_.to_take.advance();
      team_.again = true;
      return;
    }
    // Two buffers are enough: whoever puts down sums number k + 2 has taken number k + 1, which
    // each block told when its threads, at this barrier, had taken number k.
    team_.ring.barrier();
    const int buffer = team_.once_more.buffer;
    for (int part = warp(); part < team_.ring.parts; part += team_.ring.threads / kWarp) {
      tell<kSums>(team_.ring, buffer, part, part_sum(team_.ring, memory().of_warps[buffer][part]));
    }
    if (threadIdx.x == 0) expect_sums<kSums>(team_.ring, buffer);
    wait_for(&memory().told[buffer], team_.once_more.phase);
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = total(team_.ring, memory().sums[buffer], s);
    team_.once_more.advance();
  }
  __device__ static bool any(bool is_so) { return is_so; }

  // As tell_all wants them.
  template <class Ring>
  __device__ static float part_sum(const Ring& ring, const float* of_warps) {
    const bool is_one = lane() < ring.threads / kWarp;
    float sums[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = is_one ? of_warps[lane() * kSums + s] : 0.0f;
    return sums_over_lanes<kWarp>(sums);
  }
  template <class Ring>
  __device__ static float total(const Ring& ring, const float (*of_parts)[RingMemory::kMostSums],
                                int number) {
    float sum = 0;
    for (int part = 0; part < ring.shape.parts; ++part) sum += of_parts[part][number];
    return sum;
  }

 private:
  __device__ static int lane() { return int(threadIdx.x) % kWarp; }
  __device__ static int warp() { return int(threadIdx.x) / kWarp; }
  __device__ RingMemory& memory() const { return team_.ring.memory(); }

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
