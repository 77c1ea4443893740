// Rows that come into the shared memory of a block by the copy engine of compute capability 9.0:
// threads need no registers for what is on its way, so that a multiprocessor has more of it. A row,
// or a part of one, at a time: other blocks of the multiprocessor have theirs on the way meanwhile,
// and rows that are fetched further ahead were measured to make it slower.
#pragma once

#include <optional>

#include "common/cuda/row_parts.cuh"
#include "common/cuda/tma_tiles.cuh"

namespace dsx::cuda {

// Begins to copy bytes of one piece: a multiple of 16, as are both addresses.
__device__ inline void fetch_piece(void* near, const void* far, int bytes, Barrier* barrier,
                                   uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(shared_address(near)),
      "l"(far), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// Begins to copy bytes of shared memory, of which threads have shown what they wrote to it, and
// waits until they have been read.
__device__ inline void store_piece(void* far, const void* near, int bytes, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(far),
      "r"(shared_address(near)), "r"(bytes), "l"(policy)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
// So that the engine sees what this thread wrote to shared memory.
__device__ inline void show_to_engine() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// What a block has of a row of kTensors tensors: `count` elements of each from number `first` on.
template <class T, int kTensors>
struct StreamedRow {
  T* memory;  // [kTensors, count]
  Barrier* arrived;
  int64_t first;
  int count;
  uint64_t policy;
  int phase = 0;

  static int64_t bytes(int64_t count) { return kTensors * count * int64_t(sizeof(T)); }

  // All threads of the block call it before a barrier of theirs.
  __device__ void begin() const {
    if (threadIdx.x > 0) return;
    begin_barrier(arrived, 1);
    show_barriers();
  }

  // One thread calls it, once nobody reads the row before.
  __device__ void ask(const Pointer<T> (&rows)[kTensors]) const {
    const int bytes = count * int(sizeof(T));
    arrive_expecting(arrived, kTensors * bytes);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      fetch_piece(memory + t * count, rows[t].address + first, bytes, arrived, policy);
    }
  }
  // All threads call it for each row that was asked for.
  __device__ void wait() {
    wait_for(arrived, phase);
    phase ^= 1;
  }

  __device__ Floats<kRowVector> vector(int tensor, int i) const {
    RowVector<T> found;
    const uint4* source = reinterpret_cast<const uint4*>(memory + tensor * count + i);
#pragma unroll
    for (int k = 0; k < found.kAccesses; ++k) found.words[k] = source[k];
    return floats_of(found);
  }

  // Calls body(i) for each vector of this thread, from element i of the part on.
  template <class Body>
  __device__ void for_each_vector(const Body& body) const {
#pragma unroll
    for (int v = 0; v < kVectorsOfPart; ++v) {
      const int i = (v * int(blockDim.x) + int(threadIdx.x)) * kRowVector;
      if (i < count) body(i);
    }
  }
};

// How rows are streamed: clusters of blocks, or blocks where rows have one part, take one after the
// other.
struct RowStream {
  Launch launch;
  int part;
};

// For so many rows of this length, which are long enough for teams of part_of. None if the code
// that the device runs of the kernel has no copy engine.
template <class T, int kTensors, class... Parameters>
std::optional<RowStream> stream_of(void (*kernel)(Parameters...), int64_t rows, int64_t length,
                                   const char* op) {
  if (parts_of(length) > kMostParts || !can_chain(kernel, op)) return {};
  const int part = int(std::min(part_of(length), length)), parts = int(parts_of(length));
  const int threads = int(part_of(length) / kPartOfThread);
  RowStream made{{0, threads, StreamedRow<T, kTensors>::bytes(part), parts, false}, part};
  if (!fill_with_clusters(made.launch, rows, kernel, op)) return {};
  return made;
}

}  // namespace dsx::cuda
