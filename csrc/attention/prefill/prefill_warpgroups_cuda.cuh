// prefill_attention on CUDA by groups of warps, of compute capability 9.0: for queries of 16 bits
// over keys and values of the same type, or codes, whose scores are scaled products and no more. A
// block goes through strips of rows; of its groups one fetches what the others multiply. Tiles of
// keys are counted from the start of the sequence, so a row finds the same however a prompt is cut.
#pragma once

#include "attention/prefill/prefill_warpgroups_fetch_cuda.cuh"
#include "attention/prefill/prefill_warpgroups_rows_cuda.cuh"
#include "attention/prefill/prefill_warpgroups_widen_cuda.cuh"

namespace dsx::cuda {

// Calls body(strip) for the strips of a block that have rows, in their order.
template <class Shape, class Body>
__device__ inline void for_each_strip(const PrefillAttention& call, const Body& body) {
  StripsOfBlock strips(call, Shape::kRows);
  while (strips.next()) {
    const StripOfRows strip(call, strips.number(), Shape::kRows);
    if (!strip.wrong && strip.first_row < strip.rows()) body(strip);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    prefill_warpgroups_kernel(const __grid_constant__ PrefillAttention call,
                              const __grid_constant__ PrefillMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Pipeline = WarpgroupPipeline<Shape>;
  extern __shared__ __align__(1024) char shared_bytes[];
  Pipeline& pipeline = *reinterpret_cast<Pipeline*>(shared_bytes + Pipeline::kBytesBefore);
  if (threadIdx.x == 0) pipeline.begin();
  __syncthreads();
  const int group = __shfl_sync(0xffffffff, int(threadIdx.x) / Shape::kGroupThreads, 0);
  if (group == 0) {
    give_registers<Shape::kFetchRegisters>();
    if (threadIdx.x < 32) {
      if (threadIdx.x != 0) return;
      TileFetcher<Shape> fetcher(call, maps, shared_bytes, pipeline);
      for_each_strip<Shape>(call, [&](const StripOfRows& strip) {
        fetcher.fetch(strip, SeenTiles<Shape>(call, strip));
      });
    } else {
      QueryFetcher<Shape> fetcher(call, shared_bytes, pipeline, int(threadIdx.x) - 32);
      for_each_strip<Shape>(call, [&](const StripOfRows& strip) { fetcher.fetch(strip); });
    }
  } else if (Shape::kCodes && group == 1) {
    if constexpr (Shape::kCodes) {
      give_registers<Shape::kWidenRegisters>();
      CodeWidener<Shape> widener(call, shared_bytes, pipeline);
      for_each_strip<Shape>(call, [&](const StripOfRows& strip) {
        widener.widen(strip, SeenTiles<Shape>(call, strip));
      });
    }
  } else {
    take_registers<Shape::kRowRegisters>();
    GroupRows<Shape> rows(call, shared_bytes, pipeline, group - Shape::kOthers);
    StripsOfBlock strips(call, Shape::kRows);
    while (strips.next()) {
      const StripOfRows strip(call, strips.number(), Shape::kRows);
      const int there = strip.rows() - strip.first_row;
      if (strip.wrong || there < Shape::kRows) {
        store_the_rest(call, strip, Shape::kRows, strip.wrong,
                       int(threadIdx.x) - Shape::kOthers * Shape::kGroupThreads,
                       Shape::kRowThreads);
      }
      if (!strip.wrong && there > 0) rows.attend(strip, SeenTiles<Shape>(call, strip));
    }
  }
#else
  __trap();  // it is not launched
#endif
}

}  // namespace dsx::cuda
