// TMA tiles of a matrix in shared memory: some rows by 128 bytes of each. Of a line, which is 128
// bytes, unit number u of 16 bytes lies at place u ^ line % 8, so that a column of units is spread
// over all banks. That is how the copy engine of compute capability 9.0 stores them ("128B
// swizzle"), in one instruction for a tile; older devices copy unit by unit to the same places.
//
// Also the barriers that tell when copies have arrived, and when what they brought has been read.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace dsx::cuda {

constexpr int kLineBytes = 128, kUnitBytes = 16, kUnitsOfLine = kLineBytes / kUnitBytes;
constexpr int kTmaTileAlignment = 8 * kLineBytes;  // of a tile in shared memory

DSX_HOST_DEVICE inline int place_in_tma_tile(int line, int unit) {
  return line * kLineBytes + (unit ^ line % kUnitsOfLine) * kUnitBytes;
}

__device__ inline unsigned shared_address(const void* near) {
  return unsigned(__cvta_generic_to_shared(near));
}

// Where something is in shared memory.
struct Near {
  unsigned address;

  __device__ Near(unsigned at) : address(at) {}
  __device__ Near(const void* at) : address(shared_address(at)) {}
};

__device__ inline float load_shared(unsigned address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

// A barrier in shared memory goes through phases 0, 1, 0 ...: each ends when so many have arrived,
// and when all bytes that were announced have.
using Barrier = uint64_t;

__device__ inline void begin_barrier(Near barrier, int arrivals) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier.address), "r"(arrivals)
               : "memory");
#endif
}

// So that the copy engine sees barriers that this thread has begun.
__device__ inline void show_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ inline void arrive(Near barrier) {
#if __CUDA_ARCH__ >= 800
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier.address)
               : "memory");
#endif
}

// Arrives once the copies have that this thread has begun by fetch_bytes or fetch_part.
__device__ inline void arrive_after_fetches(Near barrier) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier.address) : "memory");
#endif
}

// Arrives, and announces bytes. This and what follows is for the copy engine, of 9.0 and newer.
__device__ inline void arrive_expecting(Near barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier.address),
               "r"(bytes)
               : "memory");
#endif
}

__device__ inline void wait_for(Near barrier, int phase) {
#if __CUDA_ARCH__ >= 900
#define DSX_HAS_ENDED "mbarrier.try_wait.parity.shared.b64 "
#else
#define DSX_HAS_ENDED "mbarrier.test_wait.parity.shared.b64 "
#endif
#if __CUDA_ARCH__ >= 800
  uint32_t ended;
  do {
    asm volatile("{ .reg .pred p; " DSX_HAS_ENDED "p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(ended)
                 : "r"(barrier.address), "r"(phase)
                 : "memory");
  } while (ended == 0);
#endif
#undef DSX_HAS_ENDED
}
// The same for all threads of a warp: none goes on before all have seen the phase end, as to one
// that looks after the next phase has ended, too, it has yet to. Where the next one cannot end
// without these threads, wait_for is enough.
__device__ inline void wait_together_for(Near barrier, int phase) {
  wait_for(barrier, phase);
  __syncwarp();
}

// For what is read once: it leaves the L2 cache before what others read again, code among it.
__device__ inline uint64_t read_once() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// Begins to copy tiles that lie side by side, the first one `column` tiles from the left: one after
// the other, the first one aligned to kTmaTileAlignment. What lies outside of the matrix becomes 0.
__device__ inline void fetch_tma_tiles(Near near, const CUtensorMap& map, int row, int column,
                                       Near barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(near.address),
      "l"(&map), "r"(0), "r"(row), "r"(column), "r"(barrier.address)
      : "memory");
#endif
}
// The same, by a policy for the L2 cache.
__device__ inline void fetch_tma_tiles(Near near, const CUtensorMap& map, int row, int column,
                                       Near barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(near.address),
      "l"(&map), "r"(0), "r"(row), "r"(column), "r"(barrier.address), "l"(policy)
      : "memory");
#endif
}

// Begins to copy a rectangle of numbers, row by row, to an address aligned to 128 bytes. What lies
// outside of the matrix becomes 0.
__device__ inline void fetch_tile(Near near, const CUtensorMap& map, int column, int row,
                                  Near barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(near.address),
      "l"(&map), "r"(column), "r"(row), "r"(barrier.address), "l"(policy)
      : "memory");
#endif
}

// Asks for tiles to be brought into the L2 cache, and no nearer.
__device__ inline void ask_for_tma_tiles(const CUtensorMap& map, int row, int column) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map),
               "r"(0), "r"(row), "r"(column)
               : "memory");
#endif
}

__device__ inline void ask_for_map(const CUtensorMap& map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// What the copy engine has to know of a matrix.
struct Matrix {
  const void* data;      // at a multiple of 16 bytes
  int64_t rows, length;  // in elements; whole tiles
  int64_t pitch;         // from one row to the next, in bytes: a multiple of 16
  int element_bytes;
};

// Whether tiles of it can be copied by the engine.
inline bool fits_tma_tiles(const Matrix& matrix) {
  const bool aligned = (reinterpret_cast<uintptr_t>(matrix.data) | matrix.pitch) % 16 == 0;
  const bool whole = matrix.length > 0 && matrix.length * matrix.element_bytes % kLineBytes == 0;
  const int64_t most = INT32_MAX;
  return aligned && whole && matrix.pitch >= 0 && matrix.pitch < int64_t(1) << 40 &&
         matrix.rows > 0 && matrix.rows <= most && matrix.length <= most;
}

// The driver's function that makes a map; null if there is none.
inline auto map_encoder() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                              12000, cudaEnableDefault, &result);
#else
  const cudaError_t status =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();  // there is another way
    found = nullptr;
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

// How fetch_tma_tiles reads it: so many rows by so many tiles at a time. False if the driver
// refuses.
inline bool make_map(CUtensorMap& map, const Matrix& matrix, int rows, int tiles) {
  const auto encode = map_encoder();
  if (encode == nullptr) return false;
  const cuuint64_t line = kLineBytes / matrix.element_bytes;  // elements
  const cuuint64_t sizes[] = {line, cuuint64_t(matrix.rows), cuuint64_t(matrix.length) / line};
  const cuuint64_t pitches[] = {cuuint64_t(matrix.pitch), kLineBytes};
  const cuuint32_t box[] = {cuuint32_t(line), cuuint32_t(rows), cuuint32_t(tiles)};
  const cuuint32_t steps[] = {1, 1, 1};
  const auto type = matrix.element_bytes == 4   ? CU_TENSOR_MAP_DATA_TYPE_UINT32
                    : matrix.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                                : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode(&map, type, 3, const_cast<void*>(matrix.data), sizes, pitches, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// How fetch_tile reads floats: so many rows by so many columns at a time, the columns a multiple of
// 4. False if the driver refuses.
inline bool make_tile_map(CUtensorMap& map, const float* data, int64_t rows, int64_t columns,
                          int64_t pitch, int tile_rows, int tile_columns) {
  const auto encode = map_encoder();
  const uint64_t bytes = uint64_t(pitch) * sizeof(float);
  if (encode == nullptr || rows == 0 || columns == 0) return false;
  if ((reinterpret_cast<uintptr_t>(data) | bytes) % 16 != 0) return false;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t pitches[] = {bytes};
  const cuuint32_t box[] = {cuuint32_t(tile_columns), cuuint32_t(tile_rows)};
  const cuuint32_t steps[] = {1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<float*>(data), sizes, pitches,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace dsx::cuda
