// What rows add to the gradients of vectors: each thread adds up its columns over the rows of its
// block, in registers or in shared memory, or a kernel of its own does where rows are not held.
#pragma once

#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// Columns of a thread over the rows of its block, in registers.
template <class Team>
struct RegisterSum {
  Floats<kRowVector> totals[Team::kVectors > 0 ? Team::kVectors : 1] = {};

  __device__ void add(const Floats<kRowVector>& term, int v) { totals[v] = totals[v] + term; }

  // Those of a block; all its threads call it.
  __device__ void finish(float* memory, int64_t length) const {  // [length] written
    if (memory == nullptr) return;
    if constexpr (Team::kShort) {
      __shared__ float of_teams[Team::kTeams][kShortRow];
#pragma unroll
      for (int k = 0; k < kRowVector; ++k) {
        of_teams[Team::team()][Team::thread() * kRowVector + k] = totals[0].lanes[k];
      }
      __syncthreads();
      float sum = 0;
      if (int(threadIdx.x) < length) {
#pragma unroll
        for (int team = 0; team < Team::kTeams; ++team) sum += of_teams[team][threadIdx.x];
        memory[threadIdx.x] = sum;
      }
      __syncthreads();  // before another sum is here
    } else {
      for_each_row_vector<Team>(length, [&](int v, int64_t i, int count) {
        put(Pointer<float>{memory + i}, 0, count, true, totals[v]);
      });
    }
  }
};

// The same in shared memory, for what registers have no room for: each thread has its own places.
template <class Team>
struct SharedSum {
  float4* places = nullptr;  // null: not wanted

  // How many float4 a block of so many threads needs.
  DSX_HOST_DEVICE static constexpr int size(int threads) {
    return Team::kVectors * kRowVector / 4 * threads;
  }

  __device__ void begin(float4* memory) {
    places = memory + threadIdx.x;
#pragma unroll
    for (int k = 0; k < size(1); ++k) places[k * int(blockDim.x)] = {};
  }

  __device__ void add(const Floats<kRowVector>& term, int v) const {
    if (places == nullptr) return;
#pragma unroll
    for (int k = 0; k < kRowVector; k += 4) {
      float4& place = places[(v * kRowVector + k) / 4 * int(blockDim.x)];
      float4 total = place;
      total.x += term.lanes[k];
      total.y += term.lanes[k + 1];
      total.z += term.lanes[k + 2];
      total.w += term.lanes[k + 3];
      place = total;
    }
  }

  __device__ void finish(float* memory, int64_t length) const {
    if (places == nullptr) return;
    for_each_row_vector<Team>(length, [&](int v, int64_t i, int /*count*/) {
#pragma unroll
      for (int k = 0; k < kRowVector; k += 4) {
        *reinterpret_cast<float4*>(memory + i + k) =
            places[(v * kRowVector + k) / 4 * int(blockDim.x)];
      }
    });
  }
};

}  // namespace dsx::cuda
