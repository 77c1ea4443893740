// Chains of small kernels without gaps: a kernel that is launched as part of one may begin while
// the one before it on the stream still runs. Before it waits for that one it may write nothing,
// and read nothing but what no kernel changes; it may ask for any memory to be brought into the
// L2 cache (ask_for_tma_tiles), where it is found whatever becomes of it until then. With clusters
// of blocks, as both are launched alike.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/check.h"

namespace dsx::cuda {

// Kernels over more rows are in no chain: with few, most of the time is that between two kernels.
constexpr int64_t kChainedRows = 64;

// The next kernel of the chain may begin as soon as all blocks of this one have come here.
__device__ inline void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until all before this kernel has ended, and all that it wrote can be read. Each thread that reads
// or writes global memory calls it, and no kernel of a chain may leave it out: the next one relies
// on it, too.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Which block of its cluster this is.
__device__ inline unsigned rank_in_cluster() {
#if __CUDA_ARCH__ >= 900
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// A barrier of all threads of a cluster of so many blocks: what they wrote to shared memory before
// it can be read after it.
__device__ inline void cluster_barrier(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    return;
  }
#else
  (void)blocks;
#endif
  __syncthreads();
}

// A barrier of all threads of a cluster in two halves: what a thread does after the second, it does
// after all have begun the first. Nobody may read what others wrote. Before 9.0 they do nothing.
__device__ inline void come_to_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Both at once; what was read may be overwritten after it.
__device__ inline void cluster_barrier_after_reading(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    come_to_cluster();
    wait_for_cluster();
    return;
  }
#else
  (void)blocks;
#endif
  __syncthreads();
}

// Writes to where block number `rank` of the cluster has what this one has at `near`, in shared
// memory.
__device__ inline void write_in_cluster(float* near, int blocks, unsigned rank, float value) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    unsigned address = unsigned(__cvta_generic_to_shared(near));
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
    return;
  }
#else
  (void)blocks, (void)rank;
#endif
  *near = value;
}

// The same while the thread goes on: the barrier of that block that is where this one has `barrier`
// counts the bytes. For compute capability 9.0 and newer; in a cluster of several blocks.
__device__ inline void send_in_cluster(float* near, uint64_t* barrier, unsigned rank, float value) {
#if __CUDA_ARCH__ >= 900
  unsigned address = unsigned(__cvta_generic_to_shared(near));
  unsigned counter = unsigned(__cvta_generic_to_shared(barrier));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(counter) : "r"(rank));
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
          address),
      "f"(value), "r"(counter)
      : "memory");
#endif
}

struct Launch {
  unsigned blocks;
  int threads;
  int64_t shared_bytes;
  int cluster;   // blocks that share their memory; 1 where can_chain is false
  bool chained;  // it waits for the kernel before it by itself; false where can_chain is
};

// Whether the code that the current device runs of this kernel has all of the above: that of 9.0
// and newer. A newer device may run the code of an older one.
template <class... Parameters>
bool can_chain(void (*kernel)(Parameters...), const char* op) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), op);
  return attributes.ptxVersion >= 90;
}

// A launch as CUDA wants it. It points into itself, and stays where it was made.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};

  LaunchConfig(const Launch& launch, cudaStream_t stream) {
    if (launch.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = unsigned(launch.cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    if (launch.chained) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDim = dim3(launch.blocks);
    config.blockDim = dim3(unsigned(launch.threads));
    config.dynamicSmemBytes = size_t(launch.shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
};

// For a launch with so much shared memory. What is allowed is the kernel's, not the launch's: were
// it less than all there is, another thread's launch of the kernel might be refused.
template <class... Parameters>
void allow_shared_memory(void (*kernel)(Parameters...), int64_t bytes, const char* op) {
  if (bytes <= 32 * 1024) return;  // every device has that, beside what a kernel has anyway
  int device = 0, most = 0;
  check(cudaGetDevice(&device), op);
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), op);
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), op);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             most - int(attributes.sharedSizeBytes)),
        op);
}

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Launch& launch, cudaStream_t stream,
                   const char* op, const Arguments&... arguments) {
  check(cudaPeekAtLastError(), op);  // of somebody before
  allow_shared_memory(kernel, launch.shared_bytes, op);
  const LaunchConfig made(launch, stream);
  check(cudaLaunchKernelEx(&made.config, kernel, Parameters(arguments)...), op);
}

}  // namespace dsx::cuda
