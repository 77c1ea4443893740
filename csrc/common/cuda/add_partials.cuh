// The sum of what groups of rows have added up, column by column, in a fixed order.
#pragma once

#include "common/cuda/chain.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// Columns of a block, and threads that divide the groups of a column.
constexpr int kColumns = 32, kColumnThreads = 32;

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

static __global__ void __launch_bounds__(kColumns* kColumnThreads)
    add_partials_kernel(const __grid_constant__ PartialSums sums, int64_t groups, int64_t length) {
  __shared__ float of_threads[kColumnThreads][kColumns];
  const int lane = threadIdx.x % kColumns, thread = threadIdx.x / kColumns;
  const int64_t column = int64_t(blockIdx.x) * kColumns + lane;
  const float* partials = sums.partials[blockIdx.y];
  wait_for_previous();
  float sum = 0;
  if (column < length) {
#pragma unroll 16  // loads in flight
    for (int64_t group = thread; group < groups; group += kColumnThreads) {
      sum += partials[group * length + column];
    }
  }
  of_threads[thread][lane] = sum;
  __syncthreads();
  if (thread > 0 || column >= length) return;
  sum = 0;
  for (int i = 0; i < kColumnThreads; ++i) sum += of_threads[i][lane];
  const Rows& target = sums.targets[blockIdx.y];
  store<Access::single>(target.row<Any>(0) + column, Floats<1>(sum), 1);
}

// The same of long vectors, where most of the time is that of reading: a thread has four columns.
constexpr int kLongColumns = 4, kLongThreads = 8;

static __global__ void __launch_bounds__(kWarp* kLongThreads)
    add_long_partials_kernel(const __grid_constant__ PartialSums sums, int64_t groups,
                             int64_t length) {
  __shared__ float4 of_threads[kLongThreads][kWarp];
  const int lane = threadIdx.x % kWarp, thread = threadIdx.x / kWarp;
  const int64_t column = (int64_t(blockIdx.x) * kWarp + lane) * kLongColumns;
  const float* partials = sums.partials[blockIdx.y];
  wait_for_previous();
  float4 sum = {0, 0, 0, 0};
  const auto add = [&](const float4& more) {
    sum.x += more.x;
    sum.y += more.y;
    sum.z += more.z;
    sum.w += more.w;
  };
  if (column < length) {
#pragma unroll 4  // loads in flight
    for (int64_t group = thread; group < groups; group += kLongThreads) {
      add(*reinterpret_cast<const float4*>(partials + group * length + column));
    }
  }
  of_threads[thread][lane] = sum;
  __syncthreads();
  if (thread > 0 || column >= length) return;
  sum = {0, 0, 0, 0};
#pragma unroll
  for (const auto& each : of_threads) add(each[lane]);
  const Rows& target = sums.targets[blockIdx.y];
  Floats<kLongColumns> found;
  found.lanes[0] = sum.x, found.lanes[1] = sum.y, found.lanes[2] = sum.z, found.lanes[3] = sum.w;
  store<Access::single>(target.row<Any>(0) + column, found, kLongColumns);
}

inline void add_long_partials(const PartialSums& sums, int64_t groups, int64_t length,
                              const char* op, cudaStream_t stream) {
  if (sums.count == 0) return;
  const bool chained = can_chain(add_long_partials_kernel, op);
  LaunchConfig made(
      {unsigned(ceil_div(length, kWarp * kLongColumns)), kWarp * kLongThreads, 0, 1, chained},
      stream);
  made.config.gridDim.y = unsigned(sums.count);
  check(cudaLaunchKernelEx(&made.config, add_long_partials_kernel, sums, groups, length), op);
}

// Queues it. Where the kernel before lets it begin early, its launch takes no time of its own.
inline void add_partials(const PartialSums& sums, int64_t groups, int64_t length, const char* op,
                         cudaStream_t stream) {
  if (sums.count == 0) return;
  const bool chained = can_chain(add_partials_kernel, op);
  LaunchConfig made(
      {unsigned(ceil_div(length, kColumns)), kColumns * kColumnThreads, 0, 1, chained}, stream);
  made.config.gridDim.y = unsigned(sums.count);
  check(cudaLaunchKernelEx(&made.config, add_partials_kernel, sums, groups, length), op);
}

}  // namespace dsx::cuda
