// Tensor cores of compute capability 9.0 by four warps together, a warpgroup: the first one has a
// number that 4 divides, and all threads of the four call what is here. Only code for 9.0a has it.
// A product has the same bits as by multiply_matrices (mma.cuh).
#pragma once

#include <cstdint>

#include "common/cuda/registers.cuh"
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
// Columns of the tile's other side: 16 rows from `near` on are what a product adds up over, and the
// 128 bytes of each are columns of the result, as are those of the next tiles, which begin so many
// bytes further on. Rows further down are 128 bytes each further on.
__device__ inline uint64_t transposed_tile_factors(unsigned near, int next_tile) {
  return tma_tile_factors(near) + (uint64_t(next_tile / 16 - 1) << 16);
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
// The compiler uses none of these registers earlier than here.
template <int kCount>
__device__ inline void use_from_here(float (&registers)[kCount]) {
#pragma unroll
  for (float& each : registers) asm volatile("" : "+f"(each)::"memory");
}

#define DSX_EIGHT(i)                                                                          \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define DSX_THIRTY_TWO(i) DSX_EIGHT(i), DSX_EIGHT(i + 8), DSX_EIGHT(i + 16), DSX_EIGHT(i + 24)
#define DSX_FIRST_32                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19," \
  " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DSX_NEXT_32                                                                           \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49," \
  " %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DSX_LAST_64                                                             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, " \
  "%94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, "    \
  "%107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, "    \
  "%119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DSX_FACTORS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
// c [64 x n], from registers, or from shared memory alone.
#define DSX_MULTIPLY_32(type)                                                    \
  asm volatile(                                                                  \
      "{ .reg .pred p; setp.ne.b32 p, %21, 0;"                                   \
      " wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type               \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}," \
      " {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"                                \
      : DSX_EIGHT(0), DSX_EIGHT(8)                                               \
      : DSX_FACTORS, "r"(int(adds)))
#define DSX_MULTIPLY_64(type)                                                        \
  asm volatile(                                                                      \
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;"                                       \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" DSX_FIRST_32 \
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"                                \
      : DSX_THIRTY_TWO(0)                                                            \
      : DSX_FACTORS, "r"(int(adds)), "n"(int(kTransposed)))
#define DSX_MULTIPLY_128(type)                                                        \
  asm volatile(                                                                       \
      "{ .reg .pred p; setp.ne.b32 p, %69, 0;"                                        \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" DSX_FIRST_32 \
      ", " DSX_NEXT_32 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"                \
      : DSX_THIRTY_TWO(0), DSX_THIRTY_TWO(32)                                         \
      : DSX_FACTORS, "r"(int(adds)), "n"(int(kTransposed)))
#define DSX_MULTIPLY_256(type)                                                                \
  asm volatile(                                                                               \
      "{ .reg .pred p; setp.ne.b32 p, %133, 0;"                                               \
      " wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" DSX_FIRST_32         \
      ", " DSX_NEXT_32 ", " DSX_LAST_64 "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134; }" \
      : DSX_THIRTY_TWO(0), DSX_THIRTY_TWO(32), DSX_THIRTY_TWO(64), DSX_THIRTY_TWO(96)         \
      : DSX_FACTORS, "r"(int(adds)), "n"(int(kTransposed)))
#define DSX_MULTIPLY_SHARED_64(type)                                                 \
  asm volatile(                                                                      \
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;"                                       \
      " wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" DSX_FIRST_32 \
      "}, %32, %33, p, 1, 1, 0, 0; }"                                                \
      : DSX_THIRTY_TWO(0)                                                            \
      : "l"(a), "l"(b), "r"(int(adds)))
#define DSX_MULTIPLY_SHARED_128(type)                                                 \
  asm volatile(                                                                       \
      "{ .reg .pred p; setp.ne.b32 p, %66, 0;"                                        \
      " wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" DSX_FIRST_32 \
      ", " DSX_NEXT_32 "}, %64, %65, p, 1, 1, 0, 0; }"                                \
      : DSX_THIRTY_TWO(0), DSX_THIRTY_TWO(32)                                         \
      : "l"(a), "l"(b), "r"(int(adds)))

// Begins c = a b, or c += a b if `adds`. Of each warp, a [16 x 16] and c [16 x 8 tiles] are as of
// multiply_matrices, c tile by tile; b [16 x 8 tiles] is transposed, as tma_tile_factors says, or
// with kTransposed as transposed_tile_factors does.
template <class T, bool kTransposed = false, int kSums>
__device__ inline void begin_product(float (&c)[kSums], const uint32_t (&a)[4], uint64_t b,
                                     bool adds) {
  static_assert(kSums == 32 || kSums == 64 || kSums == 128 || (kSums == 16 && !kTransposed));
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kBrain = T::kQuietNan == BFloat16::kQuietNan;
  if constexpr (kSums == 16 && kBrain) {
    DSX_MULTIPLY_32("bf16");
  } else if constexpr (kSums == 16) {
    DSX_MULTIPLY_32("f16");
  } else if constexpr (kSums == 32 && kBrain) {
    DSX_MULTIPLY_64("bf16");
  } else if constexpr (kSums == 32) {
    DSX_MULTIPLY_64("f16");
  } else if constexpr (kSums == 64 && kBrain) {
    DSX_MULTIPLY_128("bf16");
  } else if constexpr (kSums == 64) {
    DSX_MULTIPLY_128("f16");
  } else if constexpr (kBrain) {
    DSX_MULTIPLY_256("bf16");
  } else {
    DSX_MULTIPLY_256("f16");
  }
#endif
}

// The same with a, too, in shared memory as tma_tile_factors says: 16 rows for each warp.
template <class T, int kSums>
__device__ inline void begin_product(float (&c)[kSums], uint64_t a, uint64_t b, bool adds) {
  static_assert(kSums == 32 || kSums == 64);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool kBrain = T::kQuietNan == BFloat16::kQuietNan;
  if constexpr (kSums == 32 && kBrain) {
    DSX_MULTIPLY_SHARED_64("bf16");
  } else if constexpr (kSums == 32) {
    DSX_MULTIPLY_SHARED_64("f16");
  } else if constexpr (kBrain) {
    DSX_MULTIPLY_SHARED_128("bf16");
  } else {
    DSX_MULTIPLY_SHARED_128("f16");
  }
#endif
}
#undef DSX_EIGHT
#undef DSX_THIRTY_TWO
#undef DSX_FIRST_32
#undef DSX_NEXT_32
#undef DSX_LAST_64
#undef DSX_FACTORS
#undef DSX_MULTIPLY_32
#undef DSX_MULTIPLY_64
#undef DSX_MULTIPLY_128
#undef DSX_MULTIPLY_256
#undef DSX_MULTIPLY_SHARED_64
#undef DSX_MULTIPLY_SHARED_128

// Two groups of a block multiply in turns: a warp is kept at a product from registers until the one
// before it has begun, and two groups that begin together would make their numbers together, too,
// while tensor cores have nothing to do. Both take as many turns; a group alone needs none.
class Turns {
 public:
  __device__ Turns(int group, bool two) : mine_(kFirst + group), two_(two) {
    if (two_ && group == 1) give(kFirst);
  }
  __device__ void wait() const {
    if (two_) asm volatile("bar.sync %0, %1;" ::"r"(mine_), "n"(kThreads) : "memory");
  }
  __device__ void pass() const {
    if (two_) give(2 * kFirst + 1 - mine_);
  }
  // Nobody waits any more.
  __device__ void end() const {
    if (mine_ == kFirst) wait();
  }

 private:
  static constexpr int kFirst = 2, kThreads = 2 * kGroupWarps * 32;  // barriers of the block

  __device__ static void give(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
  }

  const int mine_;
  const bool two_;
};

}  // namespace dsx::cuda
