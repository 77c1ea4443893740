// Stores to the shared memory of other blocks of a cluster that announce themselves to a barrier
// there: who waits for it waits for what it reads, not for all threads of the cluster.
#pragma once

#include "common/cuda/tma_tiles.cuh"

namespace dsx::cuda {

// Writes to where block number `rank` of the cluster has what this one has at `near`, and tells the
// barrier that is there what this one has at `barrier`.
__device__ inline void tell_in_cluster(float* near, Barrier* barrier, unsigned rank, float value) {
#if __CUDA_ARCH__ >= 900
  unsigned there = shared_address(near), its_barrier = shared_address(barrier);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(its_barrier) : "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there),
      "r"(__float_as_uint(value)), "r"(its_barrier)
      : "memory");
#endif
}
// Until a phase of a barrier of this block has ended, where what others of the cluster told it can
// be read then.
__device__ inline void wait_for_told(Barrier* barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  uint32_t ended;
  do {
    asm volatile(
        "{ .reg .pred p;"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
        " selp.u32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  } while (ended == 0);
#endif
}

}  // namespace dsx::cuda
