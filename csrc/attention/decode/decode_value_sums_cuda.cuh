// V^T p: the sums of values that 8 rows take from a page, by tensor cores.
#pragma once

#include "attention/decode/decode_scores_cuda.cuh"

namespace dsx::cuda {

// What the warps have found for 8 rows, each in its page.
template <int kWidth>
struct Found {
  static constexpr int kStride = kWidth + 4;
  float values[kPageWarps][kTileRows][kStride];
  Powers powers[kPageWarps][kTileRows];
};

// A lane's sums of its elements of a head, for its two rows.
template <class Q, class Kind, int kWidth>
class ValueSums {
  using M = std::conditional_t<Kind::kQuantized, Half, Q>;  // of what is multiplied
  using Layout = cuda::StageLayout<Kind, kWidth>;
  using Lane = PageLane<Kind, kWidth>;
  static constexpr int kMmaTiles = kStageTokens / 16;
  static constexpr int kLoads = Layout::kRow / 32;  // of 32 bytes of 16 tokens
  static constexpr int kSteps = Layout::kElements / 16;

 public:
  using OfStage = float[kSteps][4];

  __device__ void clear() {
    for_each([](int, float& sum) { sum = 0; });
  }
  // Those of the elements that stage number k of a page has.
  __device__ OfStage& of_stage(int k) { return sums_[Layout::column_tile(k)]; }

  // Adds the values in stage number k, with the weights of its tokens.
  __device__ void add(const Lane& lane, const char* stage, int k,
                      const Scores<Q, Kind, kWidth>& scores) {
    const int first = Layout::token_tile(k) * kMmaTiles;
    OfStage& sums = of_stage(k);
#pragma unroll
    for (int t = 0; t < kMmaTiles; ++t) {
      const float (&mine)[4] = scores.of_tile(first + t);
      const uint32_t weights[2] = {transposed_matrix(rounded_pair<M>(mine[0], mine[1])),
                                   transposed_matrix(rounded_pair<M>(mine[2], mine[3]))};
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        uint32_t m[4];
        load_matrices<true>(m, stage + lane.place(t, load));
        if constexpr (Kind::kQuantized) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t low = for_values<Kind>(m[2 * i]), high = for_values<Kind>(m[2 * i + 1]);
            const uint32_t values[4] = {widened<Kind, false>(low), widened<Kind, true>(low),
                                        widened<Kind, false>(high), widened<Kind, true>(high)};
            multiply_matrices<M>(sums[2 * load + i], values, weights);
          }
        } else {
          const uint32_t values[4] = {m[0], m[2], m[1], m[3]};
          multiply_matrices<M>(sums[load], values, weights);
        }
      }
    }
  }

  // Multiplies each row's sums.
  __device__ void scale(const float (&factors)[2]) {
    for_each([&](int i, float& sum) { sum *= factors[i]; });
  }

  // Leaves those of the first `rows` rows where the other warps read them.
  __device__ void store(const Lane& lane, int warp, int rows, const Powers (&powers)[2],
                        Found<kWidth>& found) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane.number % 4 * 2 + i;
      if (row >= rows) continue;
      if (lane.number < 4) found.powers[warp][row] = powers[i];
      float* const values = found.values[warp][row];
#pragma unroll
      for (int step = 0; step < kWidth / 16; ++step) {
        const float (&sums)[4] = sums_[step / kSteps][step % kSteps];
        if constexpr (Kind::kQuantized) {
          *reinterpret_cast<float2*>(values + lane.element(step, 0)) =
              make_float2(sums[i], sums[2 + i]);
        } else {
          values[lane.element(step, 0)] = sums[i];
          values[lane.element(step, 1)] = sums[2 + i];
        }
      }
    }
  }

 private:
  // Calls do_it(i, sum) for each sum, of row i of this lane's.
  template <class Do>
  __device__ void for_each(const Do& do_it) {
#pragma unroll
    for (OfStage& sums : sums_) {
#pragma unroll
      for (auto& of_step : sums) {
#pragma unroll
        for (int i = 0; i < 4; ++i) do_it(i % 2, of_step[i]);
      }
    }
  }

  OfStage sums_[Layout::kColumnTiles];
};

}  // namespace dsx::cuda
