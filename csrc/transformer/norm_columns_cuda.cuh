// What rows add to the gradients of vectors: each thread adds up its columns over the rows of its
// block, in registers or in shared memory, or a kernel of its own does where rows are not held.
#pragma once

#include "common/cuda/rows.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>
#define DSX_HAS_CLUSTERS
#endif

namespace dsx::cuda {

// Blocks that can read each other's shared memory; one where there are no clusters.
class Cluster {
 public:
#if defined(DSX_HAS_CLUSTERS) && defined(__CUDA_ARCH__)
  __device__ int blocks() const { return int(group_.num_blocks()); }
  __device__ int rank() const { return int(group_.block_rank()); }
  __device__ void meet() const { group_.sync(); }
  template <class T>
  __device__ T* of_block(T* mine, int rank) const {
    return group_.map_shared_rank(mine, rank);
  }

 private:
  cooperative_groups::cluster_group group_ = cooperative_groups::this_cluster();

 public:
#else
  __device__ int blocks() const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ void meet() const { __syncthreads(); }
  template <class T>
  __device__ T* of_block(T* mine, int) const {
    return mine;
  }
#endif
  __device__ int64_t number() const { return int64_t(blockIdx.x) / blocks(); }
};

// Columns of a thread over the rows of its block, in registers.
template <class Team>
struct RegisterSum {
  Floats<kRowVector> totals[Team::kVectors > 0 ? Team::kVectors : 1] = {};

  __device__ void add(const Floats<kRowVector>& term, int v) { totals[v] = totals[v] + term; }

  template <class Next>
  __device__ void update(int v, const Next& next) {
    totals[v] = next(totals[v]);
  }

  // Those of a block, which is in no cluster; all its threads call it.
  __device__ void finish(const Cluster&, float* memory, int64_t length) const {  // [length] written
    if (memory == nullptr) return;
    {
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

  template <class Next>
  __device__ void update(int v, const Next& next) const {
    if (places != nullptr) set(v, next(get(v)));
  }

  // Those of the blocks of a cluster in their order, of which each block adds up a part: float4
  // number `part` of each thread. All have met before.
  __device__ void finish(const Cluster& cluster, float* memory, int64_t length) const {
    if (places == nullptr) return;
    for (int part = cluster.rank(); part < size(1); part += cluster.blocks()) {
      const int64_t vector = part * 4 / kRowVector * int64_t(Team::threads()) + Team::thread();
      const int64_t i = vector * kRowVector + part * 4 % kRowVector;
      if (i >= length) continue;
      float4 sum = {0, 0, 0, 0};
      for (int rank = 0; rank < cluster.blocks(); ++rank) {
        const float4 four = cluster.of_block(places, rank)[part * int(blockDim.x)];
        sum.x += four.x;
        sum.y += four.y;
        sum.z += four.z;
        sum.w += four.w;
      }
      *reinterpret_cast<float4*>(memory + i) = sum;
    }
  }

 private:
  __device__ static int place(int v, int k) { return (v * kRowVector + k) / 4 * int(blockDim.x); }
};

}  // namespace dsx::cuda
