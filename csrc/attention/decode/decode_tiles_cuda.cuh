// TMA tiles of pages in shared memory: 64 or 128 bytes of each of some tokens of a head, as
// common/cuda/tma_tiles.cuh has those of a matrix.
#pragma once

#include "common/cuda/tma_tiles.cuh"
#include "attention/cache/paged_kv.h"

namespace dsx::cuda {

// Where piece number `piece` of 16 bytes of a row of a tile is, in 16 bytes: so the same piece of
// eight rows is read without two of them in the same bank.
template <int kRowBytes>
__device__ constexpr int swizzled(int row, int piece) {
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  return row * (kRowBytes / 16) + (piece ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4));
}

// Each thread that wrote to shared memory where something is fetched to later calls it between.
__device__ inline void wrote_before_fetch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// What follows is for the copy engine, of 9.0 and newer.

// Where a tile begins in keys or values.
struct TileOrigin {
  int element, token, head, page;
};

// Begins to copy a tile, whose bytes the barrier counts. What lies outside of a page becomes 0.
__device__ inline void fetch_page_tile(void* near, const CUtensorMap& map, const TileOrigin& origin,
                                       Barrier* barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(near)),
      "l"(&map), "r"(origin.element), "r"(origin.token), "r"(origin.head), "r"(origin.page),
      "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

// The same, by no policy for the L2 cache.
__device__ inline void fetch_page_tile(void* near, const CUtensorMap& map, const TileOrigin& origin,
                                       Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(near)),
      "l"(&map), "r"(origin.element), "r"(origin.token), "r"(origin.head), "r"(origin.page),
      "r"(shared_address(barrier))
      : "memory");
#endif
}

// Asks for one to be brought into the L2 cache, and no nearer.
__device__ inline void prefetch_page_tile(const CUtensorMap& map, const TileOrigin& origin) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
      "r"(origin.element), "r"(origin.token), "r"(origin.head), "r"(origin.page)
      : "memory");
#endif
}

// Begins to copy a multiple of 16 bytes, aligned to 16, which the barrier counts.
__device__ inline void fetch_in_bulk(void* near, const void* far, int bytes, Barrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(near)),
      "l"(far), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

// How fetch_page_tile reads keys or values, of so many bytes an element: so many bytes of so many
// tokens at a time. False if the driver refuses.
inline bool make_map(CUtensorMap& map, const PagedKv& kv, const void* data, int element_bytes,
                     int row_bytes, int tokens) {
  const auto encode = map_encoder();
  if (encode == nullptr || kv.pages == 0) return false;
  const cuuint64_t sizes[] = {cuuint64_t(kv.width), kPageTokens, cuuint64_t(kv.heads),
                              cuuint64_t(kv.pages)};
  const cuuint64_t distances[] = {cuuint64_t(kv.of_token * element_bytes),
                                  cuuint64_t(kv.of_head * element_bytes),
                                  cuuint64_t(kv.of_page * element_bytes)};
  const cuuint32_t tile[] = {cuuint32_t(row_bytes / element_bytes), cuuint32_t(tokens), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const auto type =
      element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto swizzle = row_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  return encode(&map, type, 4, const_cast<void*>(data), sizes, distances, tile, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace dsx::cuda
