// Chains of small kernels without gaps: a kernel that is launched as part of one may begin while
// the one before it on the stream still runs. Before it waits for that one it may write nothing,
// and read nothing but what no kernel changes; it may ask for any memory to be brought into the
// L2 cache, where it is found whatever becomes of it until then. With clusters of blocks, as both
// are launched alike.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda/check.h"

namespace dsx::cuda {

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

// Asks for memory to be brought into the L2 cache, and no nearer. The address and the bytes are
// multiples of 16.
__device__ inline void ask_for(const void* address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#else
  (void)address, (void)bytes;
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
__device__ inline void meet_in_cluster(int blocks) {
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

// Reads what block number `rank` of the cluster has where this one has `near`, in shared memory.
__device__ inline float read_in_cluster(const float* near, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  float value;
  unsigned address = unsigned(__cvta_generic_to_shared(near));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
#else
  (void)rank;
  return *near;
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

template <class... Parameters>
void allow_shared_memory(void (*kernel)(Parameters...), const Launch& launch, const char* op) {
  if (launch.shared_bytes <= 48 * 1024) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(launch.shared_bytes)),
        op);
}

// How many clusters of such a launch the device runs at the same time.
template <class... Parameters>
int clusters_at_once(void (*kernel)(Parameters...), const Launch& launch, const char* op) {
  allow_shared_memory(kernel, launch, op);
  Launch alone = launch;
  alone.chained = false;
  const LaunchConfig made(alone, nullptr);
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &made.config), op);
  return count;
}

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const Launch& launch, cudaStream_t stream,
                   const char* op, const Arguments&... arguments) {
  check(cudaPeekAtLastError(), op);  // of somebody before
  allow_shared_memory(kernel, launch, op);
  const LaunchConfig made(launch, stream);
  check(cudaLaunchKernelEx(&made.config, kernel, Parameters(arguments)...), op);
}

}  // namespace dsx::cuda
