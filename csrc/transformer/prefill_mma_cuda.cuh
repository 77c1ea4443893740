// prefill_attention on CUDA by tensor cores, for queries of 16 bits over keys and values of the
// same type, or codes, that can be read 16 bytes at a time. A block has some rows of a head of
// keys; the pages that they see come into shared memory one after the other, the next one while
// this one is worked on. Codes are widened there.
#pragma once

#include <cuda_fp8.h>

#include "common/cuda/fetch.cuh"
#include "transformer/prefill_rows_cuda.cuh"

namespace dsx::cuda {

// The part of each page that a thread fetches: 16 bytes of every few tokens.
template <class Shape>
struct PartOfPages {
  static constexpr int kElement = Shape::kCodes ? 1 : 2;
  static constexpr int kChunks = Shape::kWidthOfTile * kElement / 16;
  static constexpr int kTokens = Shape::kThreads / kChunks;  // from one to the next
  int token, bytes;
  int64_t source;  // bytes from the first one of a page
  int target;

  __device__ explicit PartOfPages(const PagedKv& kv) : token(threadIdx.x / kChunks) {
    const int chunk = threadIdx.x % kChunks, left = int(kv.width) * kElement - chunk * 16;
    bytes = left < 0 ? 0 : left < 16 ? left : 16;
    source = token * kv.of_token * kElement + (bytes > 0 ? chunk * 16 : 0);
    target = Shape::kCodes ? (token * kChunks + chunk) * 16 : Shape::place_of(token, chunk);
  }

  // Begins to fetch it from a page of which so many tokens are there; what is not becomes 0.
  __device__ void fetch(const PagedKv& kv, const char* page, int tokens, char* near) const {
    const int64_t step = kTokens * kv.of_token * kElement;
    const char* from = page + source;
#pragma unroll
    for (int i = 0; i < kPageTokens / kTokens; ++i, from += step) {
      const int there = token + i * kTokens < tokens ? bytes : 0;
      const int row = i * kTokens * kChunks * 16;
      const bool is_shifted = !Shape::kCodes && i * kTokens % 8 != 0;  // known when compiled
      const int place =
          is_shifted ? Shape::place_of(token + i * kTokens, threadIdx.x % kChunks) : target + row;
      fetch_part(near + place, there > 0 ? from : page, there);
    }
  }
};

// Four codes as two words of two elements each.
template <class T, class Stored>
__device__ inline void widen_codes(uint32_t codes, uint32_t* words) {
  if constexpr (std::is_same_v<Stored, Fp8Kv>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto pair = __nv_fp8x2_storage_t(codes >> 16 * i);
      const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3));
      const float2 floats = __half22float2(halves);
      words[i] = rounded_pair<T>(floats.x, floats.y);
    }
  } else {
    const uint32_t positive = codes ^ 0x80808080;  // 128 more
    float floats[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // above 2^23 the last bits of a float are an integer
      floats[i] = __uint_as_float(__byte_perm(positive, 0x4b000000, 0x7540 + i)) - 8388736.0f;
    }
    words[0] = rounded_pair<T>(floats[0], floats[1]);
    words[1] = rounded_pair<T>(floats[2], floats[3]);
  }
}

template <class T, class Stored, class Shape>
__device__ inline void widen_page(const char* codes, char* target) {
  constexpr int kChunks = Shape::kSteps;  // of 16 codes
#pragma unroll
  for (int i = threadIdx.x; i < kPageTokens * kChunks; i += Shape::kThreads) {
    const uint4 chunk = *reinterpret_cast<const uint4*>(codes + i * 16);
    const uint32_t parts[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
      widen_codes<T, Stored>(parts[2 * half], words);
      widen_codes<T, Stored>(parts[2 * half + 1], words + 2);
      *reinterpret_cast<uint4*>(target + Shape::place_of(i / kChunks, i % kChunks * 2 + half)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// The pages that a block goes through, in stages of shared memory.
template <class Shape>
class PageRing {
 public:
  __device__ PageRing(const PrefillAttention& call, const StripOfRows& strip, char* memory,
                      int stages, int end)
      : call_(call), strip_(strip), part_(call.kv), memory_(memory), stages_(stages), end_(end) {}

  // Begins to fetch a page, if there is one, and ends a group of copies.
  __device__ void fetch(int number) {
    if (number < end_) {
      const PagedKv& kv = call_.kv;
      const int64_t page = call_.kv.page_of(strip_.sequence.slot, number);
      const int64_t place = kv.place(page, strip_.head, 0) * (Shape::kCodes ? 1 : 2);
      const int tokens = int(strip_.sequence.length) - number * kPageTokens;
      char* const target = stage(number);
      constexpr int kBytes = Shape::kCodes ? Shape::kCodeBytes : Shape::kTileBytes;
      part_.fetch(kv, static_cast<const char*>(kv.keys) + place, tokens, target);
      part_.fetch(kv, static_cast<const char*>(kv.values) + place, tokens, target + kBytes);
      if constexpr (Shape::kCodes) {
        const int token = threadIdx.x % kPageTokens, which = threadIdx.x / kPageTokens;
        const float* scales = which == 0 ? kv.key_scales : kv.value_scales;
        const float* source = scales + kv.scale_place(page, strip_.head, token);
        float* const near = reinterpret_cast<float*>(target + 2 * kBytes) + threadIdx.x;
        if (which < 2 && token < tokens) fetch_bytes<4>(near, source);
        if (which < 2 && token >= tokens) *near = 0;
      }
    }
    end_fetches();
  }

  __device__ char* stage(int number) const {
    return memory_ + (number & (stages_ - 1)) * Shape::kStageBytes;
  }

 private:
  const PrefillAttention& call_;
  const StripOfRows& strip_;
  PartOfPages<Shape> part_;
  char* memory_;
  int stages_, end_;  // one or two stages
};

template <class T, class Shape>
__device__ inline void read_queries(const PrefillAttention& call, const StripOfRows& strip,
                                    char* target) {
  constexpr int kChunks = Shape::kSteps * 2;
  for (int i = threadIdx.x; i < Shape::kRows * kChunks; i += Shape::kThreads) {
    const int chunk = i % kChunks;
    const int64_t row = strip.first_row + i / kChunks;
    Elements<T, 8> elements = {};
    if (row < strip.rows()) {
      const T* source =
          call.q.at<T>(strip.batch, strip.token_of(row), strip.head_of(row)).address + chunk * 8;
      const int left = int(call.kv.width) - chunk * 8;
      if (left >= 8 && is_aligned<8>(source, 2)) {
        elements = load_elements<Access::vector, 8>(source, 8);
      } else {
        elements = load_elements<Access::single, 8>(source, left);
      }
    }
    *reinterpret_cast<Elements<T, 8>*>(target + Shape::place_of(i / kChunks, chunk)) = elements;
  }
}

template <class T, class Stored, int kWidth, int kWarps, int kRowTiles, int kBlocks>
__global__ void __launch_bounds__(32 * kWarps, kBlocks)
    prefill_mma_kernel(const __grid_constant__ PrefillAttention call, int stages) {
  using Shape = PrefillShape<T, Stored, kWidth, kWarps, kRowTiles>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ RowScoring scoring[Shape::kRows];
  const StripOfRows strip(call, blockIdx.x, Shape::kRows);
  const bool wrong = strip.sequence.wrong || lacks_pages(call, strip.sequence);
  const int64_t rows = ::min(strip.rows() - strip.first_row, int64_t(Shape::kRows));
  if (wrong || rows < Shape::kRows) store_the_rest(call, strip, Shape::kRows, wrong);
  if (wrong || rows <= 0) return;
  const int64_t first = seen_at(strip.position_of(strip.first_row), call.window).begin;
  const int end = int(strip.position_of(strip.first_row + rows - 1) / kPageTokens) + 1;
  int number = int(first / kPageTokens);
  PageRing<Shape> ring(call, strip, shared_bytes + Shape::kQueryBytes, stages, end);
  ring.fetch(number);
  read_queries<T, Shape>(call, strip, shared_bytes);
  __syncthreads();
  WarpRows<T, Stored, kWidth, kWarps, kRowTiles> warp(call, strip, shared_bytes, scoring);
  for (; number < end; ++number) {
    wait_for_fetches<0>();
    __syncthreads();
    if (stages > 1) ring.fetch(number + 1);
    const char* const stage = ring.stage(number);
    if constexpr (Shape::kCodes) {
      char* const tiles = ring.stage(0) + stages * Shape::kStageBytes;
      widen_page<T, Stored, Shape>(stage, tiles);
      widen_page<BFloat16, Stored, Shape>(stage + Shape::kCodeBytes, tiles + Shape::kTileBytes);
      const auto scales = reinterpret_cast<const float*>(stage + 2 * Shape::kCodeBytes);
      __syncthreads();
      warp.take_page(number * kPageTokens, tiles, tiles + Shape::kTileBytes, scales,
                     scales + kPageTokens);
    } else {
      warp.take_page(number * kPageTokens, stage, stage + Shape::kTileBytes, nullptr, nullptr);
    }
    if (stages > 1) continue;
    __syncthreads();
    ring.fetch(number + 1);
  }
  warp.store(strip);
}

}  // namespace dsx::cuda
