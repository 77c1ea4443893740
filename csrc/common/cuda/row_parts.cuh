// Long rows in parts: a block has a part of up to 16,384 elements, and the blocks of a cluster, or
// one block after the other, have the parts of a row. What is added up over a row is added up over
// each part first, then over the parts in their order: the bits depend on the row's length only.
#pragma once

#include <algorithm>

#include "common/cuda/chain.cuh"
#include "common/cuda/rows.cuh"

namespace dsx::cuda {

constexpr int kPartThreads = 512, kVectorsOfPart = 4;  // at most; of a thread
constexpr int64_t kMostOfPart = kPartThreads * kVectorsOfPart * kRowVector;
constexpr int64_t kMostParts = 8;  // that a cluster has

constexpr int64_t parts_of(int64_t length) { return ceil_div(length, kMostOfPart); }

// Elements that a thread has of a part.
constexpr int kPartOfThread = kVectorsOfPart * kRowVector;

// All parts but the last have so many elements, which are those of whole warps.
constexpr int64_t part_of(int64_t length) {
  constexpr int64_t kOfWarp = kWarp * kVectorsOfPart * kRowVector;
  return ceil_div(ceil_div(length, parts_of(length)), kOfWarp) * kOfWarp;
}

// How the blocks of a cluster tell each other their sums.
struct PartExchange {
  static constexpr int kMostSums = 4;
  static constexpr int kFloats = 2 * int(kMostParts) * kMostSums;

  int blocks;
  float* memory;  // [kFloats], shared
  int buffer = 0;

  // Returns the sums of all parts, [blocks, kMostSums]. All threads of the cluster call it. There
  // are two buffers, one after the other: nobody writes to one before all have read it and come to
  // the barrier of the other.
  template <int kSums>
  __device__ const float* gather(const float (&sums)[kSums]) {
    float* const here = memory + buffer * int(kMostParts) * kMostSums;
    buffer ^= 1;
    if (int(threadIdx.x) < blocks) {
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        write_in_cluster(here + int(rank_in_cluster()) * kMostSums + s, blocks,
                         unsigned(threadIdx.x), sums[s]);
      }
    }
    cluster_barrier(blocks);
    return here;
  }
};

// How many clusters of this launch, or blocks where it has none, run at once.
template <class... Parameters>
int64_t clusters_at_once(void (*kernel)(Parameters...), Launch launch, const char* op) {
  int found = 0;
  if (launch.cluster > 1) {
    launch.blocks = unsigned(launch.cluster);
    const LaunchConfig made(launch, nullptr);
    check(cudaOccupancyMaxActiveClusters(&found, kernel, &made.config), op);
    return found;
  }
  int device = 0, processors = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), op);
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, launch.threads,
                                                      size_t(launch.shared_bytes)),
        op);
  return int64_t(found) * processors;
}

// Gives a launch whose clusters take one row after the other as many of them as run at once, no
// more than there are rows; false if none does.
template <class... Parameters>
bool fill_with_clusters(Launch& launch, int64_t rows, void (*kernel)(Parameters...),
                        const char* op) {
  allow_shared_memory(kernel, launch.shared_bytes, op);
  const int64_t clusters = std::min(rows, clusters_at_once(kernel, launch, op));
  launch.blocks = unsigned(clusters * launch.cluster);
  return clusters > 0;
}

}  // namespace dsx::cuda
