// Sums over the threads of a block, and over the blocks of a tensor, added in a fixed order: no
// atomics, so every run gives the same bits. A kernel has each of its blocks store the sums of its
// chunk with store_block_sums; launch_add_blocks then adds those of each tensor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/cuda/check.h"
#include "common/cuda/launch.cuh"

namespace dsx::cuda {

// Adds `sums` of all threads of the block, of which there are kThreads, and stores the totals.
// Every thread of the block calls it, once.
template <int kSums>
__device__ inline void store_block_sums(double (&sums)[kSums],
                                        double* totals) {  // [kSums] written
  constexpr int kWarpSize = 32;
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ double of_warps[kSums][kWarps];
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      sums[k] += __shfl_down_sync(0xffffffff, sums[k], distance);
    }
    if (threadIdx.x % kWarpSize == 0) of_warps[k][threadIdx.x / kWarpSize] = sums[k];
  }
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  double total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += of_warps[threadIdx.x][warp];
  totals[threadIdx.x] = total;
}

constexpr int kTensorsPerSum = 4000;

// Travels as kernel parameters: no copy to the device to wait for, and a CUDA graph captures it.
struct BlockSums {
  int64_t first_block[kTensorsPerSum + 1];  // of each tensor, then the end
  const double* sums;                       // [blocks, kSums]
  double* totals;                           // [tensors, kSums] written
};
static_assert(sizeof(BlockSums) <= kMaxKernelParameterBytes);

// Block i adds what the blocks of tensor i have stored.
template <int kSums>
__global__ void __launch_bounds__(kThreads) add_blocks(const __grid_constant__ BlockSums blocks) {
  const int64_t end = blocks.first_block[blockIdx.x + 1];
  double sums[kSums] = {};
#pragma unroll 8  // loads in flight: there are ten thousand blocks in a large tensor
  for (int64_t i = blocks.first_block[blockIdx.x] + threadIdx.x; i < end; i += kThreads) {
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k] += blocks.sums[i * kSums + k];
  }
  store_block_sums(sums, blocks.totals + int64_t(blockIdx.x) * kSums);
}

// Queues the sums over the blocks of each tensor. A tensor without blocks has the sum 0.
template <int kSums>
void launch_add_blocks(const int64_t* first_block,  // [count + 1] of each tensor, then the end
                       int64_t count,
                       const double* sums,  // [first_block[count], kSums] device memory
                       double* totals,      // [count, kSums] device memory, written
                       cudaStream_t stream, const char* op) {
  BlockSums blocks;
  blocks.sums = sums;
  for (int64_t first = 0; first < count; first += kTensorsPerSum) {
    const int64_t tensors = std::min<int64_t>(kTensorsPerSum, count - first);
    std::copy_n(first_block + first, tensors + 1, blocks.first_block);
    blocks.totals = totals + first * kSums;
    add_blocks<kSums><<<unsigned(tensors), kThreads, 0, stream>>>(blocks);
    check(cudaGetLastError(), op);
  }
}

}  // namespace dsx::cuda
