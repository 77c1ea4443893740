// The gradients of a norm where the teams that have the rows also add up what these add to the
// gradients of vectors: each takes one row after the other, which come through shared memory, and a
// thread's columns are added up in its registers.
#pragma once

#include "common/cuda/fetch.cuh"
#include "norm/norm_parts_cuda.cuh"

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
  __device__ void barrier() const { group_.sync(); }
  template <class T>
  __device__ const T* of_block(T* mine, int rank) const {
    return group_.map_shared_rank(mine, rank);
  }

 private:
  cooperative_groups::cluster_group group_ = cooperative_groups::this_cluster();
#else
  __device__ int blocks() const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ void barrier() const { __syncthreads(); }
  template <class T>
  __device__ const T* of_block(T* mine, int) const {
    return mine;
  }
#endif
};

// Several of them share a block. Threads have room for four vectors also where a warp has a row, as
// there is one kernel for all lengths.
template <class Team>
using TeamOfBlock =
    RowTeam<Team::kLength == RowLength::is_of_warp ? RowLength::is_usual : Team::kLength, false>;

// Threads of a block: as many as there is memory for.
template <class Team, class T>
constexpr int kAddingThreads = Team::kShort ? 256 : kMostOfTeam * 2 / int(sizeof(T));

// What a block has of rows that its cluster shares: `count` elements, the last block perhaps fewer.
// Else all of them.
struct PartOfRow {
  int count, blocks;
};

// The memory of a block. While a row is worked on, the next one is on its way: of x and of the
// gradient there are two stages, of the gradient of the sum one. Each thread has memory of its
// own, and each half warp some for the first vector of a row; the weight is there for all, as
// floats.
template <class Kind, class Team, class T>
struct RowPipeline {
  using Vector = RowVector<T>;
  static constexpr int kVectors = Team::kVectors, kStages = 2, kHalfWarp = kWarp / 2;

  const Team& team;
  // Of this thread: [stages, x and gradient, kVectors], then those of the gradient of the sum.
  Vector* rows;
  Vector* firsts;  // of this half warp: [stages]
  float* weight;   // [length], as half_of_weight says
  int64_t from;    // of a row, the element where this block begins
  int length;      // of what it has

  static int64_t bytes(int threads, int64_t length, const NormBackward& norm) {
    const int of_thread = (2 * kStages + norm.grad_sum.is_present()) * kVectors;
    const int firsts = threads / kHalfWarp * kStages;
    const int64_t of_rows = int64_t(threads * of_thread + firsts) * int(sizeof(Vector));
    return of_rows + length * int(sizeof(float));
  }

  __device__ RowPipeline(const Team& of, const NormBackward& norm, const PartOfRow& part,
                         void* memory)
      : team(of),
        from(Team::kParts ? int64_t(rank_in_cluster()) * part.count : 0),
        length(int(::min(norm.length - from, int64_t(part.count)))) {
    const int of_thread = (2 * kStages + norm.grad_sum.is_present()) * kVectors;
    rows = static_cast<Vector*>(memory) + threadIdx.x;
    firsts = static_cast<Vector*>(memory) + of_thread * int(blockDim.x);
    weight = reinterpret_cast<float*>(firsts + int(blockDim.x) / kHalfWarp * kStages);
    firsts += int(threadIdx.x) / kHalfWarp * kStages;
  }

  // All threads of the block call it.
  __device__ void fetch_weight(const NormBackward& norm) const {
#pragma unroll 4  // loads at once
    for (int i = int(threadIdx.x) * kRowVector; i < length; i += int(blockDim.x) * kRowVector) {
      RowFloats values(1.0f);
      if (norm.weight.is_present()) {
        values =
            with_offset(floats_of(fetch(norm.weight.even_row<Any>(0), from + i, kRowVector, true)),
                        norm.weight_offset);
      }
      *half_of_weight(i, 0) = {values.lanes[0], values.lanes[1], values.lanes[2], values.lanes[3]};
      *half_of_weight(i, 1) = {values.lanes[4], values.lanes[5], values.lanes[6], values.lanes[7]};
    }
    __syncthreads();
  }

  __device__ Vector& x(int stage, int v) const {
    return rows[(stage * 2 * kVectors + v) * int(blockDim.x)];
  }
  __device__ Vector& grad_out(int stage, int v) const { return x(stage, kVectors + v); }
  __device__ Vector& grad_sum(int v) const { return x(kStages, v); }

  // Calls body(v, i) for each vector.
  template <class Body>
  __device__ void for_each(const Body& body) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = (v * team.threads + team.thread) * kRowVector;
      if (i < length) body(v, i);
    }
  }

  __device__ void ask(int stage, Pointer<T> x_row, Pointer<T> grad_row) const {
    for_each([&](int v, int i) {
      fetch_bytes<int(sizeof(Vector))>(&x(stage, v), x_row.address + from + i);
      fetch_bytes<int(sizeof(Vector))>(&grad_out(stage, v), grad_row.address + from + i);
    });
    if constexpr (Kind::kCentered) {
      if (int(threadIdx.x) % kHalfWarp == 0) {
        fetch_bytes<int(sizeof(Vector))>(firsts + stage, x_row.address);
      }
    }
  }
  __device__ void ask_for_grad_sum(Pointer<T> row) const {
    for_each([&](int v, int i) {
      fetch_bytes<int(sizeof(Vector))>(&grad_sum(v), row.address + from + i);
    });
  }

  __device__ RowFloats weight_at(int i) const {
    const float4 a = *half_of_weight(i, 0), b = *half_of_weight(i, 1);
    RowFloats values;
    const float lanes[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int k = 0; k < kRowVector; ++k) values.lanes[k] = lanes[k];
    return values;
  }

 private:
  // Of parts, neighbours have halves side by side, or two threads would meet in each bank of the
  // memory; other teams have no register left for that.
  static constexpr bool kHalvesApart = Team::kParts;
  __device__ float4* half_of_weight(int i, int half) const {
    return reinterpret_cast<float4*>(weight +
                                     (kHalvesApart ? (half * length + i) / 2 : i + half * 4));
  }
};

// A row of the pipeline, as Moments reads it.
template <class Pipeline>
struct PipelineRow {
  const Pipeline& pipeline;
  int stage;
  bool is_there;

  // All threads of a warp call it.
  __device__ float near() const {
    __syncwarp();  // with the thread that has fetched the first vector
    return is_there ? sum_of_lanes(floats_of(pipeline.firsts[stage])) / kRowVector : 0.0f;
  }

  // Calls body(i, count, vectors), with those of x and of the gradient.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
    if (!is_there) return;
    pipeline.for_each([&](int v, int i) {
      const typename Pipeline::Vector vectors[] = {pipeline.x(stage, v),
                                                   pipeline.grad_out(stage, v)};
      body(i, kRowVector, vectors);
    });
  }
};

template <class Team>
__device__ inline Team team_of(int threads, int blocks, float* of_parts) {
  if constexpr (Team::kParts) {
    return Team(blocks, of_parts);
  } else {
    return Team(threads);
  }
}

// Each team takes rows_of_team rows; its cluster adds up, or has the parts of the rows.
template <class Kind, class Team, class T>
__global__ void __launch_bounds__(kAddingThreads<Team, T>, Team::kShort ? 3 : 1)
    adding_kernel(const __grid_constant__ NormBackward norm, float inverse_n, int team_threads,
                  int rows_of_team, PartOfRow part,
                  OfVectors<float*> partials) {  // [clusters, length] written; null: not wanted
  constexpr int kVectors = Team::kVectors;
  extern __shared__ __align__(16) uint4 pipeline_memory[];
  __shared__ float reduction_memory[kReductionFloats<Kind, Team, true>];
  using Pipeline = RowPipeline<Kind, Team, T>;
  __shared__ float of_parts[Team::kParts ? PartExchange::kFloats : 1];
  const Team team = team_of<Team>(team_threads, part.blocks, of_parts);
  const Pipeline pipeline(team, norm, part, pipeline_memory);
  let_next_begin();
  const bool has_grad_sum = norm.grad_sum.is_present();
  const auto weighted = [&](int i, const auto& vectors) {
    return floats_of(vectors[1]) * pipeline.weight_at(i);
  };

  // Every team counts as many rows, as its lanes may share a warp with those of another. What is
  // asked for at each comes in two groups, in the order in which it is needed.
  const int64_t first = team.row() * rows_of_team;
  const auto is_row = [&](int number) {
    return number < rows_of_team && first + number < norm.rows;
  };
  const auto ask = [&](int number) {
    if (Kind::kCentered) __syncwarp();  // with those that read the first vector of another row
    if (is_row(number)) {
      pipeline.ask(number % Pipeline::kStages, norm.x.row<T>(first + number),
                   norm.grad_out.row<T>(first + number));
    }
    end_fetches();
  };
  const auto ask_for_grad_sum = [&](int number) {
    if (has_grad_sum && is_row(number)) {
      pipeline.ask_for_grad_sum(norm.grad_sum.row<T>(first + number));
    }
    end_fetches();
  };
  RowFloats of_weight[kVectors], of_bias[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) of_weight[v] = of_bias[v] = RowFloats(0.0f);
  Moments<Kind, Team, T, true> moments(team, reduction_memory);
  float near = 0;
  const auto put = [&](int number) {
    wait_for_fetches<2>();
    const PipelineRow<Pipeline> row{pipeline, number % Pipeline::kStages, is_row(number)};
    if (Kind::kCentered) near = row.near();
    moments.put(row, near, weighted);
  };
  ask(0);
  ask_for_grad_sum(0);
  ask(1);
  pipeline.fetch_weight(norm);
  if (Team::kParts) cluster_barrier(part.blocks);  // all are there
  put(0);
#pragma unroll 1
  for (int number = 0; number < rows_of_team; ++number) {
    const PipelineRow<Pipeline> row{pipeline, number % Pipeline::kStages, is_row(number)};
    const RowMoments<Kind> found = moments.find(row, near, inverse_n, norm.eps, weighted);
    wait_for_fetches<1>();
    if (row.is_there) {
      const Pointer<T> grad_x = norm.grad_x.even_row<T>(first + number) + pipeline.from;
      pipeline.for_each([&](int v, int i) {
        const RowFloats grad = floats_of(pipeline.grad_out(row.stage, v));
        const RowFloats value = found.standardized_of(floats_of(pipeline.x(row.stage, v)));
        RowFloats result = found.gradient(value, grad, pipeline.weight_at(i));
        if (has_grad_sum) result = result + floats_of(pipeline.grad_sum(v));
        cuda::put<Stored::streamed>(grad_x, i, kRowVector, true, result);
        of_weight[v] = add_grad_of_weight(value, grad, of_weight[v]);
        if constexpr (Kind::kCentered) of_bias[v] = of_bias[v] + grad;
      });
    }
    ask_for_grad_sum(number + 1);
    ask(number + 2);
    if (number + 1 < rows_of_team) put(number + 1);
  }
  wait_for_fetches<0>();

  if constexpr (Team::kParts) {
    const auto put_sums = [&](const RowFloats(&sums)[kVectors], float* of_all) {
      if (of_all == nullptr) return;
      float* const target = of_all + team.row() * norm.length + pipeline.from;
      pipeline.for_each([&](int v, int i) {
        store<Access::vector>(Pointer<float>{target + i}, sums[v], kRowVector);
      });
    };
    put_sums(of_weight, partials.weight);
    if constexpr (Kind::kCentered) put_sums(of_bias, partials.bias);
    return;
  }
  // The teams of all blocks of a cluster, in their order; each team adds up a part of the columns.
  const Cluster cluster;
  const int teams = int(blockDim.x) / team.threads;
  const auto finish = [&](const RowFloats(&sums)[kVectors], float* of_all) {
    float4* const fours = reinterpret_cast<float4*>(pipeline_memory);  // [2 kVectors, threads]
    cluster.barrier();  // nobody needs what was there
#pragma unroll
    for (int part = 0; part < 2 * kVectors; ++part) {
      const float* four = sums[part / 2].lanes + part % 2 * 4;
      fours[part * int(blockDim.x) + threadIdx.x] = {four[0], four[1], four[2], four[3]};
    }
    cluster.barrier();
    if (of_all == nullptr) return;
    float* const target = of_all + int64_t(blockIdx.x) / cluster.blocks() * norm.length;
    for (int part = cluster.rank() * teams + team.number; part < 2 * kVectors;
         part += cluster.blocks() * teams) {
      const int i = (part / 2 * team.threads + team.thread) * kRowVector + part % 2 * 4;
      if (i >= pipeline.length) continue;
      float4 sum = {0, 0, 0, 0};
      for (int rank = 0; rank < cluster.blocks(); ++rank) {
        const float4* there = cluster.of_block(fours, rank);
        for (int each = 0; each < teams; ++each) {
          const float4 four = there[part * int(blockDim.x) + each * team.threads + team.thread];
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
  cluster.barrier();  // before the memory of a block that others read is gone
}

}  // namespace dsx::cuda
