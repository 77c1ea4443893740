// Copies from global to shared memory that go on while the thread computes. Each thread waits for
// its own; what others have fetched it sees after a barrier.
#pragma once

#include "common/cuda/vector_io.cuh"

namespace dsx::cuda {

// Begins to copy 16 bytes to an address of shared memory. For compute capability 8.0 and newer.
__device__ inline void fetch_part(unsigned near, const void* far) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(near), "l"(far) : "memory");
#endif
}

// Those from number `bytes` on become 0.
__device__ inline void fetch_part(unsigned near, const void* far, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(near), "l"(far), "r"(bytes)
               : "memory");
#endif
}

__device__ inline void fetch_part(void* near, const void* far, int bytes) {
  fetch_part(unsigned(__cvta_generic_to_shared(near)), far, bytes);
}

// Begins to copy 4, 8, or a multiple of 16 bytes, aligned to as many, or to 16.
template <int kBytes>
__device__ inline void fetch_bytes(void* near, const void* far) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes % 16 == 0);
#if __CUDA_ARCH__ >= 800
  const unsigned target = unsigned(__cvta_generic_to_shared(near));
  if constexpr (kBytes < 16) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(far), "n"(kBytes)
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; i += 16) {
      fetch_part(target + i, static_cast<const char*>(far) + i);
    }
  }
#else
#pragma unroll
  for (int i = 0; i < kBytes; i += 4) {
    *reinterpret_cast<uint32_t*>(static_cast<char*>(near) + i) =
        *reinterpret_cast<const uint32_t*>(static_cast<const char*>(far) + i);
  }
#endif
}

// Begins to copy kCount elements, which lie as the access says.
template <Access access, int kCount, class T>
__device__ inline void fetch(T* near, const T* far) {
  if constexpr (access == Access::halves) {
    fetch_bytes<kCount / 2 * sizeof(T)>(near, far);
    fetch_bytes<kCount / 2 * sizeof(T)>(near + kHalvesApart, far + kHalvesApart);
  } else {
    fetch_bytes<kCount * sizeof(T)>(near, far);
  }
}

// Ends a group of copies: those begun since the last one.
__device__ inline void end_fetches() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until no more than this many groups, the latest ones, are under way.
template <int kGroups>
__device__ inline void wait_for_fetches() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace dsx::cuda
