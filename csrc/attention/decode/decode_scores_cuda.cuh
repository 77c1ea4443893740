// K q: the scores that 8 rows give the tokens of a page, by tensor cores, and the weights that
// become of them.
#pragma once

#include "attention/decode/decode_codes_cuda.cuh"
#include "attention/decode/decode_page_layout_cuda.cuh"
#include "attention/decode/decode_queries_cuda.cuh"

namespace dsx::cuda {

// A lane's scores: of its 8 tokens and its two rows. First they are products, added up stage by
// stage, then weights.
template <class Q, class Kind, int kWidth>
class Scores {
  using M = std::conditional_t<Kind::kQuantized, Half, Q>;  // of what is multiplied
  using Layout = cuda::StageLayout<Kind, kWidth>;
  using Lane = PageLane<Kind, kWidth>;
  using Queries = cuda::Queries<Q, Kind, kWidth>;
  static constexpr int kMmaTiles = kStageTokens / 16;
  static constexpr int kLoads = Layout::kRow / 32;  // of 32 bytes of 16 tokens
  static constexpr int kSteps = Layout::kElements / 16;

 public:
  static constexpr int kTokens = kPageTokens / 8;  // of a lane

  __device__ void clear() {
#pragma unroll
    for (auto& of_tile : scores_) {
#pragma unroll
      for (float& each : of_tile) each = 0;
    }
  }

  // Of this lane's token number k, and its row i.
  __device__ float& at(int k, int i) { return scores_[k / 2][k % 2 * 2 + i]; }
  // Of the 16 tokens of a tile of a page, as the product with values takes them.
  __device__ const float (&of_tile(int tile) const)[4] { return scores_[tile]; }

  // Adds the products of queries and the keys in stage number k of a page.
  __device__ void add(const Lane& lane, const char* stage, int k, const Queries& queries) {
    const int column = Layout::column_tile(k), first = Layout::token_tile(k) * kMmaTiles;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
#pragma unroll
      for (int t = 0; t < kMmaTiles; ++t) {
        float (&products)[4] = scores_[first + t];
        uint32_t m[4];
        load_matrices<false>(m, stage + lane.place(t, load));
        if constexpr (Kind::kQuantized) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t keys[4] = {
                widened<Kind, false>(m[2 * i]), widened<Kind, false>(m[2 * i + 1]),
                widened<Kind, true>(m[2 * i]), widened<Kind, true>(m[2 * i + 1])};
            multiply_matrices<M>(products, keys, queries.words[column * kSteps + 2 * load + i]);
          }
        } else {
          multiply_matrices<M>(products, m, queries.words[column * kSteps + load]);
        }
      }
    }
  }
  // Where keys are codes: `scales` are those of this lane's tokens.
  __device__ void scale(const float (&scales)[kTokens], const Queries& queries) {
#pragma unroll
    for (int k = 0; k < 2 * kTokens; ++k)
      at(k / 2, k % 2) *= scales[k / 2] * queries.inverse[k % 2];
  }

  // From products to weights, and their sums of the whole page.
  __device__ void weigh(const DecodeAttention& call, const Lane& lane, const PageTokens& page,
                        const Scoring (&scoring)[2], Powers (&powers)[2]) {
    score(call, lane, page, scoring);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& largest = powers[i].largest;
#pragma unroll
      for (int k = 0; k < kTokens; ++k) largest = ::fmaxf(largest, at(k, i));  // unless it is NaN
    }
    over_rows([&](int i, int distance) {
      float& largest = powers[i].largest;
      largest = ::fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = shift_of_largest(powers[i].largest);
#pragma unroll
      for (int k = 0; k < kTokens; ++k) {
        at(k, i) = fast_exp_of_negative(at(k, i) - shift);
        powers[i].sum += at(k, i);
      }
    }
    over_rows([&](int i, int distance) {
      powers[i].sum += __shfl_xor_sync(0xffffffff, powers[i].sum, distance);
    });
  }

  // Where values are codes: weights with the scales of their tokens, made to fit into 16 bits by a
  // power of 2 for each row. What brings sums back is left in `inverse`.
  __device__ void scale_to_fit(const Lane& lane, const PageTokens& page,
                               const Scoring (&scoring)[2], const float (&scales)[kTokens],
                               float (&inverse)[2]) {
    float largest[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 2 * kTokens; ++k) at(k / 2, k % 2) *= scales[k / 2];
    if (page.is_edge) {  // scales may be anything where no token is
#pragma unroll
      for (int k = 0; k < 2 * kTokens; ++k) {
        if (!scoring[k % 2].sees(key(lane, page, k / 2))) at(k / 2, k % 2) = 0;
      }
    }
#pragma unroll
    for (int k = 0; k < 2 * kTokens; ++k) {
      const float magnitude = ::fabsf(at(k / 2, k % 2));
      if (magnitude < INFINITY) largest[k % 2] = ::fmaxf(largest[k % 2], magnitude);
    }
    over_rows([&](int i, int distance) {
      largest[i] = ::fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], distance));
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Fit fit(largest[i]);
#pragma unroll
      for (int k = 0; k < kTokens; ++k) at(k, i) *= fit.factor;
      inverse[i] = fit.inverse;
    }
  }

 private:
  // Where token number k of this lane is in the sequence.
  __device__ static int key(const Lane& lane, const PageTokens& page, int k) {
    return page.begin + k * 8 + lane.number / 4;
  }

  // From products to scores: -inf for what is not seen.
  __device__ void score(const DecodeAttention& call, const Lane& lane, const PageTokens& page,
                        const Scoring (&scoring)[2]) {
    if (call.soft_cap <= 0 && call.alibi_slopes == nullptr) {
#pragma unroll
      for (int k = 0; k < 2 * kTokens; ++k) {
        const float score = at(k / 2, k % 2) * call.scale;
        const bool seen = !page.is_edge || scoring[k % 2].sees(key(lane, page, k / 2));
        at(k / 2, k % 2) = seen ? score : -INFINITY;
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < 2 * kTokens; ++k) {
      at(k / 2, k % 2) = scored(scoring[k % 2], call, at(k / 2, k % 2), key(lane, page, k / 2));
    }
  }
  // Not inline, as it is long.
  __device__ __noinline__ static float scored(Scoring scoring, const DecodeAttention& call,
                                              float product, int key) {
    return scoring.score(call, product, key);
  }

  // Both rows of a lane, and all distances to lanes that have the same ones.
  template <class Do>
  __device__ static void over_rows(const Do& do_it) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      do_it(0, distance);
      do_it(1, distance);
    }
  }

  float scores_[kPageTokens / 16][4];
};

}  // namespace dsx::cuda
