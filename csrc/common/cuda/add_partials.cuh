// The sum of what groups of rows have added up, column by column, in a fixed order.
#pragma once

#include "common/cuda/check.h"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

// Columns of a block, and threads that divide the groups of a column.
constexpr int kColumns = 32, kColumnThreads = 32;

static __global__ void __launch_bounds__(kColumns* kColumnThreads)
    add_partials_kernel(const float* partials,  // [groups, length]
                        int64_t groups, int64_t length, Rows target) {
  __shared__ float of_threads[kColumnThreads][kColumns];
  const int lane = threadIdx.x % kColumns, thread = threadIdx.x / kColumns;
  const int64_t column = int64_t(blockIdx.x) * kColumns + lane;
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
  store<Access::single>(target.row<Any>(0) + column, Floats<1>(sum), 1);
}

// Queues it. `target` is one row, and written.
inline void add_partials(const float* partials,  // [groups, length]
                         int64_t groups, int64_t length, const Rows& target, const char* op,
                         cudaStream_t stream) {
  add_partials_kernel<<<unsigned(ceil_div(length, kColumns)), kColumns * kColumnThreads, 0,
                        stream>>>(partials, groups, length, target);
  check(cudaGetLastError(), op);
}

}  // namespace dsx::cuda
