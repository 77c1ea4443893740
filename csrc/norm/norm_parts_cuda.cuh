// Teams of which each has a part of a row, and teams that are spread over the blocks of a cluster.
#pragma once

#include "common/cuda/row_parts.cuh"
#include "norm/norm_cuda.cuh"

namespace dsx::cuda {

// The threads of a block that take a part of a row, those of its cluster the row. Sums of parts are
// added in their order.
struct PartTeam : RowTeam<RowLength::is_usual> {
  static constexpr bool kParts = true;
  mutable PartExchange exchange;

  __device__ PartTeam(int blocks, float* of_parts)
      : RowTeam(int(blockDim.x)), exchange{blocks, of_parts} {}

  __device__ int64_t row() const { return blockIdx.x / unsigned(exchange.blocks); }

  template <int kSums>
  __device__ void add_over_parts(float (&sums)[kSums]) const {
    const float* all = exchange.gather(sums);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = all[s];
      for (int part = 1; part < exchange.blocks; ++part) {
        sums[s] += all[part * PartExchange::kMostSums + s];
      }
    }
  }
};

// Elements from number i on, which nobody needs again: the cache of the multiprocessor keeps what
// it has.
template <class T>
__device__ inline RowVector<T> fetch_uncached(Pointer<T> row, int64_t i) {
  RowVector<T> vector;
  const uint4* source = reinterpret_cast<const uint4*>(row.address + i);
#pragma unroll
  for (int k = 0; k < vector.kAccesses; ++k) {
    uint4& w = vector.words[k];
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                 : "l"(source + k)
                 : "memory");
  }
  return vector;
}

// A row of no more elements is not spread.
constexpr int64_t kLeastToSpread = 32768;

// The threads that take a long row, some of their warps in each block of a cluster: so a
// multiprocessor has several rows on the way, and the bits are those of one block of them all.
template <int kVectors_>
struct SpreadTeam {
  static constexpr RowLength kLength = RowLength::is_long;
  static constexpr bool kShort = false, kParts = false;
  static constexpr int kBlocks = 8, kVectors = kVectors_;  // 4 blocks: larger ones, fewer of them
  static constexpr int kThreads = kLongTeam / kBlocks;     // of a block
  // As many as have registers for the vectors and 60 more.
  static constexpr int kResident = (1 << 16) / (4 * kVectors + 60) / kThreads;
  static constexpr int64_t kMostElements = int64_t(kLongTeam) * kVectors * kRowVector;
  static constexpr int threads = kLongTeam, number = 0;

  int thread = int(rank_in_cluster()) * kThreads + int(threadIdx.x);

  __device__ int64_t row() const { return blockIdx.x / unsigned(kBlocks); }
  // Until all blocks are there, before the first sums.
  __device__ void begin() const { cluster_barrier_after_reading(kBlocks); }
  __device__ void barrier() const { cluster_barrier(kBlocks); }
  template <int kSums>
  __device__ void add_over_parts(float (&)[kSums]) const {}
};

}  // namespace dsx::cuda
