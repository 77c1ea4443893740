// What rows add to the gradients of vectors: each thread adds up its columns over the rows of its
// block, in registers or in shared memory, or a kernel of its own does where rows are not held.
#pragma once

#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// Columns of a thread of a short team over the rows of its block, in registers.
template <class Team>
struct RegisterSum {
  static_assert(Team::kShort);
  Floats<kRowVector> totals[1] = {};

  __device__ void add(const Floats<kRowVector>& term, int v) { totals[v] = totals[v] + term; }

  // Those of a block; all its threads call it.
  __device__ void finish(float* memory, int64_t length) const {  // [length] written
    if (memory == nullptr) return;
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
  }
};

// The columns of a thread in shared memory, for what registers have no room for: each thread has
// its own places.
template <class Team>
struct SharedColumns {
  float4* places = nullptr;  // null: absent

  // How many float4 a block of so many threads needs.
  DSX_HOST_DEVICE static constexpr int size(int threads) {
    return Team::kVectors * kRowVector / 4 * threads;
  }

  __device__ void begin(float4* memory, int64_t length) {
    places = memory + threadIdx.x;
    for_each_row_vector<Team>(length,
                              [&](int v, int64_t, int) { set(v, Floats<kRowVector>(0.0f)); });
  }

  __device__ void set(int v, const Floats<kRowVector>& values) const {
#pragma unroll
    for (int k = 0; k < kRowVector; k += 4) {
      const float* four = values.lanes + k;
      places[place(v, k)] = {four[0], four[1], four[2], four[3]};
    }
  }

  __device__ Floats<kRowVector> get(int v) const {
    Floats<kRowVector> values;
#pragma unroll
    for (int k = 0; k < kRowVector; k += 4) {
      const float4 four = places[place(v, k)];
      values.lanes[k] = four.x;
      values.lanes[k + 1] = four.y;
      values.lanes[k + 2] = four.z;
      values.lanes[k + 3] = four.w;
    }
    return values;
  }

  __device__ void add(const Floats<kRowVector>& term, int v) const {
    if (places != nullptr) set(v, get(v) + term);
  }

  __device__ void finish(float* memory, int64_t length) const {
    if (places == nullptr) return;
    for_each_row_vector<Team>(length, [&](int v, int64_t i, int /*count*/) {
      put(Pointer<float>{memory + i}, 0, kRowVector, true, get(v));
    });
  }

 private:
  __device__ static int place(int v, int k) { return (v * kRowVector + k) / 4 * int(blockDim.x); }
};

}  // namespace dsx::cuda
