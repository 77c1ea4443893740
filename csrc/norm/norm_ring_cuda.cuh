// Norms of rows that pass through a ring, and their gradients: what both directions share.
#pragma once

#include "common/cuda/row_ring.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// The threads of a cluster that compute take a row together. The first sums of the next row are put
// down before those of a row are taken. Sums that are taken once more for a row are put down and
// taken at once, in buffers of their own.
template <class Ring>
struct RingTeam {
  static constexpr RowLength kLength = RowLength::is_usual;
  static constexpr bool kShort = false;

  const Ring& ring;
  mutable unsigned number = 0, taken_again = 0;  // of the row of the cluster; of sums
  mutable bool again = false;                    // the first sums of the row have been taken

  __device__ explicit RingTeam(const Ring& of) : ring(of) {}
};

// Sums of parts are added in their order.
template <class Ring, int kSums>
class RingReduction {
 public:
  __device__ RingReduction(const RingTeam<Ring>& team, float*) : team_(team) {}

  __device__ void put(const float (&sums)[kSums]) const {
    const float mine = sums_over_lanes<kWarp>(sums);
    const RingTurn turn =
        team_.again ? Memory::again(team_.taken_again) : Memory::usual(team_.number);
    const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
    if (lane < kSums) memory().of_warps[turn.buffer][warp][lane] = mine;
    if (!team_.again) ring().show_sums(team_.number);
  }

  __device__ void take(float (&sums)[kSums]) const {
    if (!team_.again) {
      const float* const totals = ring().wait_for_totals(team_.number);
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] = totals[s];
      team_.again = true;
      return;
    }
    // Two buffers are enough: whoever puts down sums number k + 2 has taken number k + 1, which
    // each block told when its threads, at this barrier, had taken number k.
    ring().barrier();
    const RingTurn turn = Memory::again(team_.taken_again++);
    if (int(threadIdx.x) < kWarp) {
      ring().template tell<kSums>(turn.buffer, part_sum(ring(), memory().of_warps[turn.buffer]));
    }
    wait_for_told(&memory().told[turn.buffer], turn.phase);
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = total(ring(), memory().sums[turn.buffer], s);
  }
  __device__ static bool any(bool is_so) { return is_so; }

  // The work of warps that do not compute.
  __device__ static void help(const Ring& ring, const Rows* const (&from)[Ring::kTensors],
                              const Rows& to) {
    ring.template help<kSums>(from, to, [&](const auto& of_warps) {
      return part_sum(ring, of_warps);
    }, [&](const auto& of_parts) { return total(ring, of_parts, int(threadIdx.x) % kSums); });
  }

 private:
  using Memory = typename Ring::Memory;
  using SumsOfOne = float[Memory::kMostSums];

  __device__ static float part_sum(const Ring& ring, const SumsOfOne* of_warps) {
    const int lane = int(threadIdx.x) % kWarp;
    float sums[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = lane < ring.threads / kWarp ? of_warps[lane][s] : 0.0f;
    }
    return sums_over_lanes<kWarp>(sums);
  }
  __device__ static float total(const Ring& ring, const SumsOfOne* of_parts, int number) {
    float sum = 0;
    for (int part = 0; part < ring.shape.blocks; ++part) sum += of_parts[part][number];
    return sum;
  }

  __device__ const Ring& ring() const { return team_.ring; }
  __device__ Memory& memory() const { return team_.ring.memory; }

  const RingTeam<Ring>& team_;
};

template <class Ring, int kSums>
struct ReductionOf<RingTeam<Ring>, kSums> {
  using type = RingReduction<Ring, kSums>;
};

// As mean_of_first.
template <class Kind, class Ring>
__device__ inline float near_of(const Ring& ring, const typename Ring::Place& place) {
  if constexpr (!Kind::kCentered) return 0;
  return sum_of_lanes(floats_of(ring.first_vector(place))) / kRowVector;
}

// Finds the moments of the rows of a cluster, one after the other. row_at(place) is what a block
// has of a row that has arrived, as Moments reads it; body(place, found) makes its result.
template <class Kind, bool kGrads, class Ring, class RowAt, class Grad, class Body>
__device__ inline void for_each_row(const Ring& ring, float inverse_n, float eps,
                                    const RowAt& row_at, const Grad& grad_of, const Body& body) {
  const RingTeam<Ring> team(ring);
  Moments<Kind, RingTeam<Ring>, typename Ring::T, kGrads> moments(team, nullptr);
  typename Ring::Place next = ring.first();
  const unsigned rows = ring.rows();
#pragma unroll 1
  for (unsigned k = 0; k <= rows; ++k, ring.advance(next)) {
    if (k < rows) {
      ring.wait(next);
      team.number = k;
      moments.put(row_at(next), near_of<Kind>(ring, next), grad_of);
    }
    if (k == 0) continue;
    const typename Ring::Place place = ring.before(next);
    const float near = near_of<Kind>(ring, place);
    team.number = k - 1;
    const RowMoments<Kind> found = moments.find(row_at(place), near, inverse_n, eps, grad_of);
    team.again = false;
    body(place, found);
    ring.finish(place);
  }
}

}  // namespace dsx::cuda
