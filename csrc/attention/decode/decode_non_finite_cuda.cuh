// Values that are not finite, at an edge of what rows see: 0 times such a value is NaN, so it must
// not be multiplied with the weight of a row that does not see it.
#pragma once

#include "attention/decode/decode_any_cuda.cuh"
#include "attention/decode/decode_codes_cuda.cuh"
#include "attention/decode/decode_page_layout_cuda.cuh"

namespace dsx::cuda {

// Takes them out of a stage, in shared memory, before it is multiplied. Codes of int8 are finite.
template <class Q, class Kind, int kWidth>
class NonFinite {
  using Layout = cuda::StageLayout<Kind, kWidth>;
  using Lane = PageLane<Kind, kWidth>;
  static constexpr int kEights = kStageTokens / 8, kSteps = Layout::kElements / 16;

 public:
  // Where all rows are of one token: zeros for the tokens that none of them sees, as each sees all
  // others. `first` is the stage's first token.
  __device__ static void blank(const Lane& lane, char* stage, const PageTokens& page, int first) {
    constexpr int kPieces = Layout::kRow / 16;
    const int begin = page.seen_begin - first, end = page.seen_end - first;
    uint4* const pieces = reinterpret_cast<uint4*>(stage);
#pragma unroll
    for (int i = 0; i < kStageTokens * kPieces; i += 32) {
      const int token = (i + lane.number) / kPieces;  // in whatever order its pieces lie
      if (token < begin || token >= end) pieces[i + lane.number] = {};
    }
    wrote_before_fetch();
    __syncwarp();
  }

  // Else: masks what is not finite, and adds it to the sums of the rows that see it.
  // weight(k, i) is that of this lane's token number k of the stage, and of its row i.
  template <class Weight>
  __device__ __forceinline__ static void mask(const Lane& lane, char* stage, const PageTokens& page,
                                              int first, const DecodeAttention& call,
                                              const Scoring (&scoring)[2], const Weight& weight,
                                              float (&sums)[kSteps][4]) {
    if (!any_in(lane, stage)) return;
    const int begin = page.begin + first;
    float mine[kEights][2];  // of tokens to come, in turn
#pragma unroll
    for (int k = 0; k < kEights * 2; ++k) mine[k / 2][k % 2] = weight(k / 2, k % 2);
#pragma unroll 1
    for (int token = 0; token < ::min(kStageTokens, page.seen_end - first); ++token) {
      float weights[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[i] = __shfl_sync(0xffffffff, mine[0][i], token % 8 * 4 + lane.number % 4);
#pragma unroll
        for (int k = 1; k < kEights; ++k) {
          if (token % 8 == 7) mine[k - 1][i] = mine[k][i];
        }
      }
#pragma unroll
      for (int step = 0; step < 2 * kSteps; ++step) {
        const int byte = lane.element(step / 2, step % 2) * Layout::kBytes;
        const char* const piece = stage + swizzled<Layout::kRow>(token, byte / 16) * 16;
        const float value = element_at<Kind>(piece, call.kv.dtype, byte % 16 / Layout::kBytes);
        if (isfinite(value)) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (scoring[i].sees(begin + token))
            sums[step / 2][step % 2 * 2 + i] += weights[i] * value;
        }
      }
    }
    __syncwarp();
    for_each_word(lane, stage, [](uint32_t& word) { word &= ~not_finite(word); });
    wrote_before_fetch();
    __syncwarp();
  }

 private:
  __device__ static bool any_in(const Lane& lane, char* stage) {
    bool any = false;
    for_each_word(lane, stage, [&](uint32_t& word) { any |= not_finite(word) != 0; });
    return __any_sync(0xffffffff, any);
  }
  // Of the words of a stage, a lane has every 32nd.
  template <class Do>
  __device__ static void for_each_word(const Lane& lane, char* stage, const Do& do_it) {
#pragma unroll 4
    for (int i = lane.number * 4; i < Layout::kSize; i += 32 * 4) {
      do_it(*reinterpret_cast<uint32_t*>(stage + i));
    }
  }
  // The bits of elements of a word that are not finite.
  __device__ static uint32_t not_finite(uint32_t word) {
    if constexpr (Kind::kQuantized) return (nan_codes(word) >> 7) * 0xff;
    constexpr uint32_t kExponent = Q::kQuietNan == BFloat16::kQuietNan ? 0x7f80 : 0x7c00;
    const uint32_t low = (word & kExponent) == kExponent ? 0xffffu : 0u;
    return (word >> 16 & kExponent) == kExponent ? low | 0xffff0000u : low;
  }
};

}  // namespace dsx::cuda
