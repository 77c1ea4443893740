// Copies from global to shared memory that one thread begins and others wait for, by barriers that
// count what has arrived. Of 8.0 on; those that are one instruction whatever their size, of 9.0.
#pragma once

#include <cstdint>

namespace dsx::cuda {

// In shared memory. A phase ends when all arrivals have come, and all bytes that they expect.
struct Barrier {
  uint64_t state;

  __device__ unsigned place() const { return unsigned(__cvta_generic_to_shared(&state)); }

#if __CUDA_ARCH__ >= 800
  // One thread calls it, then all of the block meet.
  __device__ void begin(int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(place()), "r"(arrivals) : "memory");
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ void arrive() {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(place())
                 : "memory");
  }
  // When all that this thread has begun to copy by itself has arrived.
  __device__ void arrive_when_fetched() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(place()) : "memory");
  }
  __device__ bool has_ended(unsigned parity) const {
    int result;
#if __CUDA_ARCH__ >= 900
#define DSX_WAIT "mbarrier.try_wait.parity.shared.b64"  // for a while
#else
#define DSX_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
    asm volatile("{ .reg .pred ended; " DSX_WAIT
                 " ended, [%1], %2; selp.s32 %0, 1, 0, ended; }"
                 : "=r"(result)
                 : "r"(place()), "r"(parity)
                 : "memory");
#undef DSX_WAIT
    return result != 0;
  }
#else
  __device__ void begin(int) {}
  __device__ void arrive() {}
  __device__ void arrive_when_fetched() {}
  __device__ bool has_ended(unsigned) const { return true; }
#endif

#if __CUDA_ARCH__ >= 900
  __device__ void arrive_expecting(unsigned bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(
                     place()),
                 "r"(bytes)
                 : "memory");
  }
#endif

  // Until the phase with this parity has ended: of the first one it is 0. One that has not begun
  // is as if one of the other parity had ended.
  __device__ void wait(unsigned parity) const {
    while (!has_ended(parity)) {
    }
  }
};

// Each thread that wrote to shared memory where something is fetched to later calls it between.
__device__ inline void wrote_before_fetch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if __CUDA_ARCH__ >= 900
// What is read once need not stay in the L2 cache.
__device__ inline uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Begins to copy a multiple of 16 bytes, aligned to 16, which the barrier counts.
__device__ inline void fetch_in_bulk(void* near, const void* far, unsigned bytes,
                                     const Barrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(unsigned(__cvta_generic_to_shared(near))),
      "l"(far), "r"(bytes), "r"(barrier.place()), "l"(policy)
      : "memory");
}
#endif

}  // namespace dsx::cuda
