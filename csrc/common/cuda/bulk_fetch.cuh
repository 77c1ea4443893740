// Copies from global to shared memory that one thread begins and others wait for, by barriers that
// count what has arrived. Of 8.0 on; those that are one instruction whatever their size, of 9.0.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

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
    asm volatile("{ .reg .pred ended; " DSX_WAIT " ended, [%1], %2; selp.s32 %0, 1, 0, ended; }"
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
    asm volatile(
        "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(place()),
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
                                     const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(unsigned(__cvta_generic_to_shared(near))),
      "l"(far), "r"(bytes), "r"(barrier.place())
      : "memory");
}

// The same for a box of a tensor of four dimensions, from these places in them on.
__device__ inline void fetch_box(void* near, const CUtensorMap& map, int x, int y, int z, int w,
                                 const Barrier& barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
          unsigned(__cvta_generic_to_shared(near))),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier.place()), "l"(policy)
      : "memory");
}
// Asks for it to be brought into the L2 cache, and no nearer.
__device__ inline void ask_for_box(const CUtensorMap& map, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x),
      "r"(y), "r"(z), "r"(w)
      : "memory");
}
#endif

// A tensor of four dimensions, of which boxes are fetched. In shared memory, 16 bytes of a row of a
// box lie where swizzled() says.
struct TensorOfBoxes {
  const void* data;
  int bytes;             // of an element, 1 or 2
  int64_t sizes[4];      // the last dimension first
  int64_t distances[3];  // elements from one to the next, of all but that
  int row_bytes, rows;   // of a box: 64 or 128, of the first two dimensions
};
// False if there are no such boxes.
inline bool describe(CUtensorMap& map, const TensorOfBoxes& tensor) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found) : nullptr;
  }();
  if (encode == nullptr) return false;
  cuuint64_t sizes[4], distances[3];
  for (int i = 0; i < 4; ++i) sizes[i] = cuuint64_t(tensor.sizes[i] > 0 ? tensor.sizes[i] : 1);
  for (int i = 0; i < 3; ++i) distances[i] = cuuint64_t(tensor.distances[i] * tensor.bytes);
  const cuuint32_t box[4] = {cuuint32_t(tensor.row_bytes / tensor.bytes), cuuint32_t(tensor.rows),
                             1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode(&map,
                tensor.bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                4, const_cast<void*>(tensor.data), sizes, distances, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                tensor.row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Where piece number `piece` of 16 bytes of a row of a box is, in 16 bytes: so the same piece of
// eight rows is read without two of them in the same bank.
template <int kRowBytes>
__device__ constexpr int swizzled(int row, int piece) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return row * (kRowBytes / 16) + (piece ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4));
}

}  // namespace dsx::cuda
