// The gradients of a norm where the teams that have the rows also add up what these add to the
// gradients of vectors: each takes one row after the other, which come through shared memory, and a
// thread's columns are added up in its registers.
#pragma once

#include "common/cuda/fetch.cuh"
#include "transformer/norm_cuda.cuh"

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
  __device__ const T* of_block(T* mine, int rank) const {
    return group_.map_shared_rank(mine, rank);
  }

 private:
  cooperative_groups::cluster_group group_ = cooperative_groups::this_cluster();
#else
  __device__ int blocks() const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ void meet() const { __syncthreads(); }
  template <class T>
  __device__ const T* of_block(T* mine, int) const {
    return mine;
  }
#endif
};

// Several of them share a block.
template <class Team>
using TeamOfBlock = RowTeam<Team::kLength, false>;

constexpr int kStages = 2;  // rows of a team that are on their way, or being worked on

// Threads of a block.
template <class Team>
constexpr int kAddingThreads = Team::kShort ? 256 : kMostOfTeam;

// The memory of a block: for each stage, and in it for each of two tensors (or three, with the
// gradient of the sum), the vectors of all its threads; of layer normalization then the first
// vector of the row, once for each thread, so that no thread waits for another.
template <class Kind, class Team, class T>
struct Ring {
  static constexpr int kFirsts = Kind::kCentered ? 1 : 0;

  const Team& team;
  RowVector<T>* mine;  // that of this thread, of the first stage
  int tensors;
  int length;

  static int bytes(int threads, bool has_grad_sum) {
    const int of_thread = kStages * ((has_grad_sum ? 3 : 2) * Team::kVectors + kFirsts);
    const int for_sums = 2 * Team::kVectors * int(sizeof(float4));  // in the end
    return threads * std::max(of_thread * int(sizeof(RowVector<T>)), for_sums);
  }

  __device__ RowVector<T>& slot(int stage, int number) const {
    const int of_stage = tensors * Team::kVectors + kFirsts;
    return mine[(stage * of_stage + number) * int(blockDim.x)];
  }
  __device__ RowVector<T>& first(int stage) const { return slot(stage, tensors * Team::kVectors); }

  // Calls body(v, i) for each vector.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll
    for (int v = 0; v < Team::kVectors; ++v) {
      const int i = (v * team.threads + team.thread) * kRowVector;
      if (i < length) body(v, i);
    }
  }

  __device__ void ask(int stage, Pointer<T> x, Pointer<T> grad_out, Pointer<T> grad_sum) const {
    constexpr int kBytes = int(sizeof(RowVector<T>));
    for_each([&](int v, int i) {
      fetch_bytes<kBytes>(&slot(stage, v), x.address + i);
      fetch_bytes<kBytes>(&slot(stage, Team::kVectors + v), grad_out.address + i);
      if (grad_sum) {
        fetch_bytes<kBytes>(&slot(stage, 2 * Team::kVectors + v), grad_sum.address + i);
      }
    });
    if (kFirsts > 0) fetch_bytes<kBytes>(&first(stage), x.address);
  }
};

// A row of the ring, as Moments reads it.
template <class RingOfTeam, class T>
struct RingRow {
  const RingOfTeam& ring;
  int stage;
  bool is_there;

  __device__ float near() const {
    if (RingOfTeam::kFirsts == 0 || !is_there) return 0;
    return sum_of_lanes(floats_of(ring.first(stage))) / kRowVector;
  }

  // Calls body(i, count, vectors), with those of x and of the gradient.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    if (!is_there) return;
    ring.for_each([&](int v, int i) {
      const RowVector<T> vectors[] = {ring.slot(stage, v), gradient(v)};
      body(i, kRowVector, vectors);
    });
  }

  __device__ const RowVector<T>& gradient(int v) const {
    constexpr int kVectors = std::remove_cvref_t<decltype(ring.team)>::kVectors;
    return ring.slot(stage, kVectors + v);
  }
};

// Sums of rows [blockIdx.x * teams * rows_of_team, ...) of a cluster's blocks.
template <class Kind, class Team, class T>
__global__ void __launch_bounds__(kAddingThreads<Team>, Team::kShort ? 3 : 1)
    adding_kernel(const __grid_constant__ NormBackward norm, int team_threads, int rows_of_team,
                  OfVectors<float*> partials) {  // [clusters, length] written; null: not wanted
  constexpr int kVectors = Team::kVectors;
  constexpr int kTeams = Team::kShort ? 1 : kMostOfTeam / (2 * kWarp);  // of more than a warp
  extern __shared__ __align__(16) uint4 ring_memory[];
  __shared__ float meeting[kMeetingFloats<Kind, Team::kLength, true, kTeams>];
  const Team team(team_threads);
  const bool has_grad_sum = norm.grad_sum.data != nullptr;
  const bool has_weight = norm.weight.data != nullptr, same = norm.weight.dtype == norm.x.dtype;
  using RingOfTeam = Ring<Kind, Team, T>;
  const RingOfTeam ring{team, reinterpret_cast<RowVector<T>*>(ring_memory) + threadIdx.x,
                        has_grad_sum ? 3 : 2, int(norm.length)};

  const Pointer<Any> any_weight = norm.weight.even_row<Any>(0);
  const auto weight_at = [&](int i) {
    if (!has_weight) return Values(1.0f);
    const Values weight = same ? floats_of(fetch(norm.weight.even_row<T>(0), i, kRowVector, true))
                               : load<Access::vector, kRowVector>(any_weight + i, kRowVector);
    return norm.weight_offset == 0 ? weight : weight + Values(norm.weight_offset);
  };
  const auto weighted = [&](int i, const auto& vectors) {
    return floats_of(vectors[1]) * weight_at(i);
  };

  // Every team does as many turns, as its lanes may share a warp with those of another.
  const int64_t first = team.row() * rows_of_team;
  const auto is_row = [&](int turn) { return turn < rows_of_team && first + turn < norm.rows; };
  const auto ask = [&](int turn) {
    if (is_row(turn)) {
      const int64_t row = first + turn;
      ring.ask(turn % kStages, norm.x.row<T>(row), norm.grad_out.row<T>(row),
               norm.grad_sum.row<T>(row));
    }
    end_fetches();
  };
  const auto row_of = [&](int turn) {
    return RingRow<RingOfTeam, T>{ring, turn % kStages, is_row(turn)};
  };
  Values of_weight[kVectors], of_bias[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) of_weight[v] = of_bias[v] = Values(0.0f);
  Moments<Kind, Team, T, true> moments(team, meeting);
  const float inverse_n = 1.0f / float(norm.length);
#pragma unroll
  for (int turn = 0; turn < kStages; ++turn) ask(turn);
  const auto put = [&](int turn) {
    wait_for_fetches<kStages - 1>();
    const auto row = row_of(turn);
    moments.put(row, row.near(), weighted);
  };
  put(0);
#pragma unroll 1
  for (int turn = 0; turn < rows_of_team; ++turn) {
    const auto row = row_of(turn);
    const RowMoments found =
        moments.find(row, row.near(), inverse_n, norm.eps, weighted);
    if (row.is_there) {
      const Pointer<T> grad_x = norm.grad_x.even_row<T>(first + turn);
      ring.for_each([&](int v, int i) {
        const Values grad = floats_of(row.gradient(v));
        const Values value = found.deviation_of<Kind>(floats_of(ring.slot(row.stage, v)));
        Values result = found.gradient<Kind>(value, grad, weight_at(i));
        if (has_grad_sum) {
          result = result + floats_of(ring.slot(row.stage, 2 * kVectors + v));
        }
        cuda::put<Stored::streamed>(grad_x, i, kRowVector, true, result);
        of_weight[v] = add_grad_of_weight(value, grad, Values(found.inverse), of_weight[v]);
        if constexpr (Kind::kCentered) of_bias[v] = of_bias[v] + grad;
      });
    }
    ask(turn + kStages);
    if (turn + 1 < rows_of_team) put(turn + 1);
  }
  wait_for_fetches<0>();

  // The teams of all blocks of a cluster, in their order; each team adds up a part of the columns.
  const Cluster cluster;
  const int teams = int(blockDim.x) / team.threads;
  const auto finish = [&](const Values (&sums)[kVectors], float* of_all) {
    float4* const places = reinterpret_cast<float4*>(ring_memory);  // [2 kVectors, threads]
    cluster.meet();  // nobody needs what was there
#pragma unroll
    for (int part = 0; part < 2 * kVectors; ++part) {
      const float* four = sums[part / 2].lanes + part % 2 * 4;
      places[part * int(blockDim.x) + threadIdx.x] = {four[0], four[1], four[2], four[3]};
    }
    cluster.meet();
    if (of_all == nullptr) return;
    float* const target = of_all + int64_t(blockIdx.x) / cluster.blocks() * norm.length;
    for (int part = cluster.rank() * teams + team.number; part < 2 * kVectors;
         part += cluster.blocks() * teams) {
      const int i = (part / 2 * team.threads + team.thread) * kRowVector + part % 2 * 4;
      if (i >= ring.length) continue;
      float4 sum = {0, 0, 0, 0};
      for (int rank = 0; rank < cluster.blocks(); ++rank) {
        const float4* there = cluster.of_block(places, rank);
        for (int each = 0; each < teams; ++each) {
          const float4 four =
              there[part * int(blockDim.x) + each * team.threads + team.thread];
          sum.x += four.x;
          sum.y += four.y;
          sum.z += four.z;
          sum.w += four.w;
        }
      }
      *reinterpret_cast<float4*>(target + i) = sum;
    }
  };
  finish(of_weight, partials.weight);
  if constexpr (Kind::kCentered) finish(of_bias, partials.bias);
  cluster.meet();  // before the memory of a block that others read is gone
}

}  // namespace dsx::cuda
