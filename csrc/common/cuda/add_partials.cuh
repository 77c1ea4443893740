// The sum of what groups of rows have added up, column by column, in a fixed order.
#pragma once

#include "common/cuda/chain.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// A block has columns for each lane, and threads that divide the groups of a column. Of long rows,
// whose blocks are many, lanes have more columns and fewer threads divide the groups.
constexpr int64_t kManyColumns = 16'384;

// Sums of several vectors, one after the other. What is not wanted is absent.
struct PartialSums {
  static constexpr int kMost = 3;
  int count = 0;
  const float* partials[kMost];  // [groups, length]
  Rows targets[kMost];           // one row, written

  void add(const float* partial, const Rows& target) {
    if (!target.is_present()) return;
    partials[count] = partial;
    targets[count++] = target;
  }
};

template <int kColumnsOfLane, int kThreads>
static __global__ void __launch_bounds__(kWarp* kThreads)
    add_partials_kernel(const __grid_constant__ PartialSums sums, int64_t groups, int64_t length) {
  __shared__ float of_threads[kThreads][kColumnsOfLane][kWarp];
  const int lane = threadIdx.x % kWarp, thread = threadIdx.x / kWarp;
  const int64_t first = int64_t(blockIdx.x) * (kColumnsOfLane * kWarp) + lane;
  const float* partials = sums.partials[blockIdx.y];
  wait_for_previous();
  float found[kColumnsOfLane] = {};
#pragma unroll 16 / kColumnsOfLane  // loads in flight
  for (int64_t group = thread; group < groups; group += kThreads) {
#pragma unroll
    for (int c = 0; c < kColumnsOfLane; ++c) {
      const int64_t column = first + c * kWarp;
      if (column < length) found[c] += partials[group * length + column];
    }
  }
#pragma unroll
  for (int c = 0; c < kColumnsOfLane; ++c) of_threads[thread][c][lane] = found[c];
  __syncthreads();
  const int64_t column = first + thread * kWarp;
  if (thread >= kColumnsOfLane || column >= length) return;
  float sum = 0;
  for (int i = 0; i < kThreads; ++i) sum += of_threads[i][thread][lane];
  const Rows& target = sums.targets[blockIdx.y];
  store<Access::single>(target.row<Any>(0) + column, Floats<1>(sum), 1);
}

template <int kColumnsOfLane, int kThreads>
void launch_add_partials(const PartialSums& sums, int64_t groups, int64_t length, const char* op,
                         cudaStream_t stream) {
  const auto kernel = add_partials_kernel<kColumnsOfLane, kThreads>;
  LaunchConfig made({unsigned(ceil_div(length, kColumnsOfLane * kWarp)), kWarp * kThreads, 0, 1,
                     can_chain(kernel, op)},
                    stream);
  made.config.gridDim.y = unsigned(sums.count);
  check(cudaLaunchKernelEx(&made.config, kernel, sums, groups, length), op);
}

// Queues it. Where the kernel before lets it begin early, its launch takes no time of its own.
inline void add_partials(const PartialSums& sums, int64_t groups, int64_t length, const char* op,
                         cudaStream_t stream) {
  if (sums.count == 0) return;
  const bool many = length >= kManyColumns;
  const auto launch = many ? launch_add_partials<4, 8> : launch_add_partials<1, 32>;
  launch(sums, groups, length, op, stream);
}

}  // namespace dsx::cuda
