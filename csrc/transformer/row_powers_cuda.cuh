// The largest score of a row, and the sum of e^(score - that), in one pass over the scores and with
// one meeting of the threads: what softmax and cross entropy divide by.
#pragma once

#include "common/cuda/rows.cuh"

namespace dsx::cuda {

struct RowPowers {
  float largest = -INFINITY;  // not counting NaN, which shows in the sum
  float sum = 0;              // of e^(score - largest)

  // e^-inf is 0, also if there is no score yet.
  __device__ static float shift(float largest) { return largest == -INFINITY ? 0.0f : largest; }

  __device__ void raise_to(float new_largest) {
    sum *= fast_exp_of_negative(largest - shift(new_largest));
    largest = new_largest;
  }

  __device__ void add(const Floats<kRowVector>& scores) {
    float new_largest = largest;
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) new_largest = ::fmaxf(new_largest, scores.lanes[k]);
    raise_to(new_largest);
    sum += sum_of_lanes(exp_of_negative(scores - Floats<kRowVector>(shift(largest))));
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

  // Those of a team: every thread of the block calls it, with a `turn` that goes up by one each
  // time, as add_over_team says.
  template <class Team>
  __device__ void add_over_team(int turn) {
    add_over_lanes((Team::kShort ? 16 : kWarp) / 2);
    if (Team::kShort || blockDim.x == kWarp) return;
    __shared__ float2 of_warps[2][kWarp];
    const int warps = int(blockDim.x) / kWarp;
    const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
    if (lane == 0) of_warps[turn % 2][warp] = {largest, sum};
    __syncthreads();
    largest = lane < warps ? of_warps[turn % 2][lane].x : -INFINITY;
    sum = lane < warps ? of_warps[turn % 2][lane].y : 0.0f;
    add_over_lanes(kWarp / 2);
  }
};

}  // namespace dsx::cuda
