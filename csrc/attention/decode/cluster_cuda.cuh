// Clusters of blocks whose threads have different things to do until they come to a barrier:
// chain.cuh has that.
#pragma once

#include "common/cuda/chain.cuh"

namespace dsx::cuda {

// Where all threads have come to the first of these, their blocks have begun, and may be written
// to. Each calls both, in this order, before cluster_barrier.
__device__ inline void say_begun_in_cluster(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void wait_till_all_have_begun(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Four floats at once; see chain.cuh.
__device__ inline void write_in_cluster(float4* near, int blocks, unsigned rank,
                                        const float4& value) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    unsigned address = unsigned(__cvta_generic_to_shared(near));
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
                 "f"(value.y), "f"(value.z), "f"(value.w)
                 : "memory");
    return;
  }
#else
  (void)blocks, (void)rank;
#endif
  *near = value;
}

}  // namespace dsx::cuda
