// Norms of rows that pass through a ring.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// The threads of a cluster that compute take a row together. The first sums of the next row are put
// down before those of a row are taken. Sums that are taken once more for a row are put down and
// taken at once, in buffers of their own.
struct RingTeam {
  static constexpr RowLength kLength = RowLength::is_usual;
  static constexpr bool kShort = false;

  const RowRing& ring;
  mutable unsigned rows_put = 0, rows_taken = 0, taken_again = 0;
  mutable bool again = false;  // the first sums of the row have been taken

  __device__ explicit RingTeam(const RowRing& of) : ring(of) {}
};

// Sums of parts are added in their order.
template <int kSums>
class RingReduction {
 public:
  __device__ RingReduction(const RingTeam& team, float*) : team_(team) {}

  __device__ void put(const float (&sums)[kSums]) const {
    const float mine = sums_over_lanes<kWarp>(sums);
    const RingTurn turn =
        team_.again ? RingMemory::again(team_.taken_again) : RingMemory::usual(team_.rows_put);
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    if (lane < kSums) memory().of_warps[turn.buffer][warp][lane] = mine;
    if (!team_.again) ring().show_sums(team_.rows_put++);
  }

  __device__ void take(float (&sums)[kSums]) const {
    if (!team_.again) {
      const float* const totals = ring().wait_for_totals(team_.rows_taken++);
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] = totals[s];
      team_.again = true;
      return;
    }
    // Two buffers are enough: whoever puts down sums number k + 2 has taken number k + 1, which
    // each block told when its threads, at this barrier, had taken number k.
    ring().barrier();
    const RingTurn turn = RingMemory::again(team_.taken_again++);
    if (int(threadIdx.x) < kWarp) {
      ring().template tell<kSums>(turn.buffer, part_sum(ring(), memory().of_warps[turn.buffer]));
    }
    wait_for_told(&memory().told[turn.buffer], turn.phase);
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = total(ring(), memory().sums[turn.buffer], s);
  }
  __device__ static bool any(bool is_so) { return is_so; }

  // The work of warps that do not compute.
  __device__ static void help(const RowRing& ring, const Rows& from, const Rows& to) {
    ring.help<kSums>(from, to, [&](const auto& of_warps) {
      return part_sum(ring, of_warps);
    }, [&](const auto& of_parts) { return total(ring, of_parts, int(threadIdx.x) % kSums); });
  }

 private:
  using SumsOfOne = float[RingMemory::kMostSums];

  __device__ static float part_sum(const RowRing& ring, const SumsOfOne* of_warps) {
    const int lane = int(threadIdx.x) % kWarp;
    float sums[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = lane < ring.threads / kWarp ? of_warps[lane][s] : 0.0f;
    }
    return sums_over_lanes<kWarp>(sums);
  }
  __device__ static float total(const RowRing& ring, const SumsOfOne* of_parts, int number) {
    float sum = 0;
    for (int part = 0; part < ring.shape.blocks; ++part) sum += of_parts[part][number];
    return sum;
  }

  __device__ const RowRing& ring() const { return team_.ring; }
  __device__ RingMemory& memory() const { return team_.ring.memory; }

  const RingTeam& team_;
};

template <int kSums>
struct ReductionOf<RingTeam, kSums> {
  using type = RingReduction<kSums>;
};

// What a block has of a row that has arrived, as Moments reads it.
struct RingRow {
  const RowRing& ring;
  RowRing::Place place;

  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    ring.for_each_vector([&](int, int i) {
      const RowVector<RowRing::T> vectors[1] = {ring.vector(place, i)};
      body(i, kRowVector, vectors);
    });
  }

  // As mean_of_first.
  __device__ float near() const {
    return sum_of_lanes(floats_of(ring.first_vector(place))) / kRowVector;
  }
};

}  // namespace dsx::cuda
