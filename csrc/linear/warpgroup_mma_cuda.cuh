// Tensor cores of compute capability 9.0 by four warps together, a warpgroup: the first one has a
// number that 4 divides, and all threads of the four call what is here. Only code for 9.0a has it.
// A product has the same bits as by multiply_matrices (mma.cuh).
#pragma once

#include <cstdint>

#include "common/cuda/tma_tiles.cuh"

namespace dsx::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasWarpgroups = true;
#else
constexpr bool kHasWarpgroups = false;
#endif
constexpr int kGroupWarps = 4;

// Columns of a TMA tile in shared memory as factors: rows from `near` on, an address of shared
// memory that is a multiple of kTmaTileAlignment, and 32 bytes of each. Those further to the right
// in the tile are 32 bytes further on, and so are addresses in here: see further().
__device__ inline uint64_t tma_tile_factors(unsigned near) {
  constexpr uint64_t kNotUsed = 1, kEightRows = kTmaTileAlignment / 16, kSwizzled = 1;
  // Instructions take it from a register of the whole warp: all lanes have the same.
  near = __shfl_sync(0xffffffff, near, 0);
  return uint64_t(near >> 4) | kNotUsed << 16 | kEightRows << 32 | kSwizzled << 62;
}
__device__ inline uint64_t further(uint64_t factors, unsigned bytes) {
  return factors + (bytes >> 4);
}

// Before the first product, and between a change of registers that products read or write and the
// next product.
__device__ inline void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Products since the last one are a batch.
__device__ inline void end_batch() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all batches have ended but so many, the latest: registers of those that have may be used.
template <int kBatches>
__device__ inline void wait_for_batches() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kBatches) : "memory");
#endif
}

#define DSX_EIGHT(i)                                                                          \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define DSX_MULTIPLY_32(type)                                                    \
  asm volatile(                                                                  \
      "{ .reg .pred p; setp.ne.b32 p, %21, 0;"                                   \
      " wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type               \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}," \
      " {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"                                \
      : DSX_EIGHT(0), DSX_EIGHT(8)                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)))
#define DSX_MULTIPLY_64(type)                                                                  \
  asm volatile(                                                                                \
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;"                                                 \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                             \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18," \
      " %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"                     \
      " {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"                                              \
      : DSX_EIGHT(0), DSX_EIGHT(8), DSX_EIGHT(16), DSX_EIGHT(24)                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)))

// Begins c = a b, or c += a b if `adds`. Of each warp, a [16 x 16] and c [16 x 8 tiles] are as of
// multiply_matrices, c tile by tile; b [16 x 8 tiles] is transposed, as tma_tile_factors says.
template <class T, int kSums>
__device__ inline void begin_product(float (&c)[kSums], const uint32_t (&a)[4], uint64_t b,
                                     bool adds) {
  static_assert(kSums == 16 || kSums == 32);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kBrain = T::kQuietNan == BFloat16::kQuietNan;
  if constexpr (kSums == 16 && kBrain) {
    DSX_MULTIPLY_32("bf16");
  } else if constexpr (kSums == 16) {
    DSX_MULTIPLY_32("f16");
  } else if constexpr (kBrain) {
    DSX_MULTIPLY_64("bf16");
  } else {
    DSX_MULTIPLY_64("f16");
  }
#endif
}
#undef DSX_EIGHT
#undef DSX_MULTIPLY_32
#undef DSX_MULTIPLY_64

}  // namespace dsx::cuda
