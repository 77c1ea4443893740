// The largest score of a row, and the sum of e^(score - that), in one pass over the scores and with
// one barrier of the threads: what softmax and cross entropy divide by.
#pragma once

#include "common/cuda/rows.cuh"

namespace dsx::cuda {

struct RowPowers {
  float largest = -INFINITY;  // not counting NaN, which shows in the sum
  float sum = 0;              // of e^(score - largest)

  // e^-inf is 0, also if there is no score yet.
  __device__ static float shift(float largest) { return largest == -INFINITY ? 0.0f : largest; }

  // What powers relative to one number are multiplied by to be relative to a larger one.
  __device__ static float factor(float largest, float larger) {
    return fast_exp_of_negative(largest - shift(larger));
  }

  __device__ void raise_to(float larger) {
    sum *= factor(largest, larger);
    largest = larger;
  }

  // Returns the powers, relative to what is the largest now.
  __device__ Floats<kRowVector> add(const Floats<kRowVector>& scores) {
    float larger = largest;
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) larger = ::fmaxf(larger, scores.lanes[k]);
    raise_to(larger);
    const auto powers = exp_of_negative(scores - Floats<kRowVector>(shift(largest)));
    sum += sum_of_lanes(powers);
    return powers;
  }

  // Those of the lanes of a warp, or of each half of it, at these distances.
  __device__ void add_over_lanes(int furthest) {
    float most = largest;
    for (int distance = furthest; distance > 0; distance /= 2) {
      most = ::fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    }
    raise_to(most);
    for (int distance = furthest; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
  }

  // Those of another part of the row. Rounded as is written here, wherever it is compiled.
  __device__ void add(const RowPowers& other) {
    const float larger = ::fmaxf(largest, other.largest);
    const float before = __fmul_rn(sum, factor(largest, larger));
    sum = __fmaf_rn(other.sum, factor(other.largest, larger), before);
    largest = larger;
  }

  // Those of a team: every thread of the block calls it, once.
  template <class Team>
  __device__ void add_over_team() {
    add_over_lanes((Team::kShort ? 16 : kWarp) / 2);
    if constexpr (!Team::kShort) {
      if (blockDim.x == kWarp) return;
      __shared__ float2 of_warps[kWarp];
      const int warps = int(blockDim.x) / kWarp;
      const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
      if (lane == 0) of_warps[warp] = {largest, sum};
      __syncthreads();
      largest = lane < warps ? of_warps[lane].x : -INFINITY;
      sum = lane < warps ? of_warps[lane].y : 0.0f;
      add_over_lanes(kWarp / 2);
    }
  }
};

}  // namespace dsx::cuda
