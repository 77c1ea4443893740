// What a warp of prefill_attention does on CUDA with the rows that it has and a page of keys and
// values in shared memory, by tensor cores. What a row has found so far is scaled as its largest
// score grows. No row has anything to do with others.
#pragma once

#include "transformer/prefill_shape_cuda.cuh"
#include "transformer/prefill_work_cuda.cuh"

namespace dsx::cuda {

// The rows of a warp: of a lane, rows lane / 4 and 8 further down.
template <class Shape>
class WarpRows {
  using T = typename Shape::Query;
  using Value = typename Shape::Value;
  static constexpr int kWidth = Shape::kWidth, kRowTiles = Shape::kRowTiles;
  // Keys are taken in by so many, in tiles of 8: as many as there are registers for.
  static constexpr int kKeyTiles = kRowTiles == 1 && Shape::kKeyGroups == 1 ? 8 : 4;
  static constexpr int kKeys = 8 * kKeyTiles, kPart = kPageTokens / Shape::kKeyGroups;
  static constexpr bool kQueriesInRegisters = kWidth * kRowTiles <= 128;

 public:
  // What each row of the block sees is left in `scoring`, shared memory.
  __device__ WarpRows(const PrefillAttention& call, const StripOfRows& strip, const char* queries,
                      RowScoring* scoring)
      : call_(call),
        queries_(queries + row_group() * Shape::kWarpRows * kWidth * 2),
        scoring_(scoring + row_group() * Shape::kWarpRows + lane() / 4) {
    is_plain_ = call.soft_cap <= 0 && call.alibi_slopes == nullptr && call.scale > 0;
    factor_ = (is_plain_ ? call.scale : 1.0f) * kLog2OfE;
    const int64_t first = first_row(strip);
    is_used_ = first < strip.rows();
    first_position_ = int(strip.position_of(::min(first, strip.rows() - 1)));
    last_position_ = int(strip.position_of(::min(first + Shape::kWarpRows - 1, strip.rows() - 1)));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {  // of a row that is not there, what the last one has
      const int64_t row = ::min(first + lane() / 4 + 8 * i, strip.rows() - 1);
      if (lane() % 4 == 0 && key_group() == 0) {
        scoring_[8 * i] = RowScoring(call, strip.head_of(row), strip.position_of(row));
      }
      largest_[i] = -INFINITY;
      sum_[i] = 0;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) set_to_0(out_[m]);
    __syncwarp();
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < kRowTiles * Shape::kSteps; ++i) {
        load_queries(i / Shape::kSteps, i % Shape::kSteps, kept_[i]);
      }
    }
  }

  // Takes in this warp's part of the page whose first token is at `first`; scales are of codes.
  __device__ void take_page(int first, const char* keys, const char* values,
                            const float* key_scales, const float* value_scales) {
    const int begin = key_group() * kPart;
#pragma unroll 1
    for (int i = begin; i < begin + kPart; i += kKeys) {
      const int place = i * kWidth * 2;
      take(first + i, keys + place, values + place, key_scales + i, value_scales + i);
    }
  }

  // Adds what the groups have found, in their order, to what the first one has. All threads call
  // it; `memory` is for what the others have.
  __device__ void merge(char* memory) {
    float* const mine =
        reinterpret_cast<float*>(memory) + row_group() * 32 * Shape::kFloatsOfLane + lane();
    for (int group = 1; group < Shape::kKeyGroups; ++group) {
      __syncthreads();
      int i = 0;
      const auto next = [&]() -> float& { return mine[32 * i++]; };
      if (key_group() == group) {
        for_each_sum([&](float& each, int) { next() = each; });
#pragma unroll
        for (int row = 0; row < kRows; ++row) next() = largest_[row], next() = sum_[row];
      }
      __syncthreads();
      if (key_group() > 0) continue;
      float shares[2][kRows];
      i = kRowTiles * kWidth / 2;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float other = next(), largest = ::fmaxf(largest_[row], other);
        const float shift = shift_of_largest(largest);
        shares[0][row] = fast_exp2((largest_[row] - shift) * factor_);
        shares[1][row] = fast_exp2((other - shift) * factor_);
        largest_[row] = largest;
        sum_[row] = __fmaf_rn(sum_[row], shares[0][row], next() * shares[1][row]);
      }
      i = 0;
      for_each_sum([&](float& each, int row) {
        each = __fmaf_rn(each, shares[0][row], next() * shares[1][row]);
      });
    }
  }

  __device__ void store(const StripOfRows& strip) {
    if (key_group() > 0) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int64_t row = first_row(strip) + lane() / 4 + 8 * i;
      if (row >= strip.rows()) continue;
      const float natural = is_plain_ ? call_.scale : 1.0f;
      const float largest = largest_[i] == -INFINITY ? -INFINITY : largest_[i] * natural;
      const EndOfRow end(call_, strip.head_of(row), largest, sum);
      const int64_t index = strip.index_of(row);
      if (lane() % 4 == 0) call_.lse[index] = end.lse;
      T* const out = static_cast<T*>(call_.out) + index * call_.kv.width;
      const int width = int(call_.kv.width);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const int place = n * 8 + lane() % 4 * 2;
        const float first = out_[i / 2][n][i % 2 * 2] * end.factor;
        const float second = out_[i / 2][n][i % 2 * 2 + 1] * end.factor;
        if (width % 2 == 0 && place < width) {
          *reinterpret_cast<uint32_t*>(out + place) = packed<T>(first, second);
        } else {
          if (place < width) out[place] = narrow<T>(first);
          if (place + 1 < width) out[place + 1] = narrow<T>(second);
        }
      }
    }
  }

 private:
  __device__ void take(int first, const char* keys, const char* values, const float* key_scales,
                       const float* value_scales) {
    const int begin = int(seen_at(first_position_, call_.window).begin);
    if (!is_used_ || first > last_position_ || first + kKeys <= begin) return;
    multiply_keys(keys);
    const int all_from = int(seen_at(last_position_, call_.window).begin);
    const bool is_edge = first < all_from || first + kKeys > first_position_ + 1;
    weigh(first, is_edge, key_scales, value_scales);
    if (is_edge && is_not_finite(values)) {  // it must not reach rows that do not see it
      add_values<true>(values);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) add_not_finite(m, first, values);
    } else {
      add_values<false>(values);
    }
  }

  static constexpr int kRows = 2 * kRowTiles;  // of a lane

  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int row_group() { return threadIdx.x / 32 % Shape::kRowGroups; }
  __device__ static int key_group() { return threadIdx.x / 32 / Shape::kRowGroups; }
  __device__ static int64_t first_row(const StripOfRows& strip) {
    return strip.first_row + row_group() * Shape::kWarpRows;
  }

  // Calls body(sum, row) for all sums of values of a lane.
  template <class Body>
  __device__ void for_each_sum(const Body& body) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (auto& tile : out_[m]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) body(tile[i], 2 * m + i / 2);
      }
    }
  }

  template <int kCount>
  __device__ static void set_to_0(float (&tiles)[kCount][4]) {
#pragma unroll
    for (auto& tile : tiles) {
#pragma unroll
      for (float& each : tile) each = 0;
    }
  }

  __device__ void load_queries(int m, int step, uint32_t (&words)[4]) const {
    const int place = Shape::place_of(m * 16 + lane() % 16, 2 * step + lane() / 16);
    load_matrices<false>(words, queries_ + place);
  }

  // What is multiplied in a step of 16 elements.
  struct StepOfKeys {
    uint32_t q[kRowTiles][4], keys[kKeyTiles / 2][4];
  };

  __device__ void load_step(const char* keys, int step, StepOfKeys& words) const {
    const int token = lane() % 8 + lane() / 16 * 8, half = lane() / 8 % 2;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if constexpr (!kQueriesInRegisters) load_queries(m, step, words.q[m]);
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles / 2; ++n) {
      load_matrices<false>(words.keys[n], keys + Shape::place_of(n * 16 + token, 2 * step + half));
    }
  }

  // What a step takes is on its way from shared memory while the one before is worked on.
  __device__ void multiply_keys(const char* keys) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) set_to_0(scores_[m]);
    StepOfKeys words[2];
    load_step(keys, 0, words[0]);
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      if (step + 1 < Shape::kSteps) load_step(keys, step + 1, words[(step + 1) % 2]);
      StepOfKeys& now = words[step % 2];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int kept = m * Shape::kSteps + step;
          uint32_t (&q)[4] = kQueriesInRegisters ? kept_[kept % kKept] : now.q[m];
          multiply_matrices<T>(scores_[m][n], q,
                               {now.keys[n / 2][n % 2 * 2], now.keys[n / 2][n % 2 * 2 + 1]});
        }
      }
    }
  }

  // From products to weights; what is not seen has none.
  __device__ void weigh(int first, bool is_edge, const float* key_scales,
                        const float* value_scales) {
    const int key = lane() % 4 * 2;  // and the next one, of 8
    if constexpr (Shape::kCodes) scale_scores(key_scales + key);
    if (!is_plain_ || is_edge) shape_scores(first + key, is_edge);
    float largest[kRows], share[kRows], sums[kRows][2] = {};
    bool is_same = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = largest_[i];
      for_each_score(i, [&](float& score, int) { largest[i] = ::fmaxf(largest[i], score); });
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = ::fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], 1));
      largest[i] = ::fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], 2));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float shift = shift_of_largest(largest[i]);
      share[i] = fast_exp2((largest_[i] - shift) * factor_);  // 1 if it is the same
      is_same = is_same && share[i] == 1;
      largest_[i] = largest[i];
      largest[i] = -shift * factor_;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for_each_score(i, [&](float& score, int n) {
        score = fast_exp2(__fmaf_rn(score, factor_, largest[i]));
        sums[i][n % 2] += score;
      });
      sum_[i] = __fmaf_rn(sum_[i], share[i], sums[i][0] + sums[i][1]);
    }
    if (!__all_sync(0xffffffff, is_same)) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (auto& each : out_[i / 2]) {
          each[i % 2 * 2] *= share[i];
          each[i % 2 * 2 + 1] *= share[i];
        }
      }
    }
    if constexpr (Shape::kCodes) {
      scale_scores(value_scales + key);
      if (!is_edge) return;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {  // a scale may be NaN
        const RowScoring scoring = scoring_[8 * i];
        for_each_score(
            i, [&](float& score, int n) { score = scoring.sees(first + key + n) ? score : 0.0f; });
      }
    }
  }

  // From products with keys from number `key` on to scores, which are -inf where nothing is seen.
  __device__ void shape_scores(int key, bool is_edge) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const RowScoring scoring = scoring_[8 * i];
      if (!is_plain_) {
        for_each_score(i,
                       [&](float& score, int n) { score = scoring.score(call_, score, key + n); });
      }
      for_each_score(i, [&](float& score, int n) {
        score = !is_edge || scoring.sees(key + n) ? score : -INFINITY;
      });
    }
  }

  // Calls body(score, n) for the scores of row i of a lane, and keys number n from its first one
  // on.
  template <class Body>
  __device__ void for_each_score(int i, const Body& body) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) body(scores_[i / 2][n][i % 2 * 2 + k], n * 8 + k);
    }
  }

  __device__ void scale_scores(const float* scales) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float2 both = *reinterpret_cast<const float2*>(scales + n * 8);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores_[m][n][i] *= i % 2 == 0 ? both.x : both.y;
      }
    }
  }

  // The weights of 16 keys, as the first factor of a product.
  __device__ void load_weights(int m, int step, uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&scores)[4] = scores_[m][2 * step + i / 2];
      words[i] = rounded_pair<Value>(scores[i % 2 * 2], scores[i % 2 * 2 + 1]);
    }
  }

  __device__ static const char* place_of_values(const char* values, int step, int n) {
    return values + Shape::place_of(step * 16 + lane() % 16, 2 * n + lane() / 16);
  }

  template <bool kFiniteOnly>
  __device__ void add_values(const char* values) {
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      uint32_t weights[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) load_weights(m, step, weights[m]);
#pragma unroll
      for (int n = 0; n < Shape::kSteps; ++n) {
        uint32_t words[4];
        load_matrices<true>(words, place_of_values(values, step, n));
        if constexpr (kFiniteOnly) {
#pragma unroll
          for (uint32_t& word : words) word &= ~not_finite_halves<Value>(word);
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_matrices<Value>(out_[m][2 * n], weights[m], {words[0], words[1]});
          multiply_matrices<Value>(out_[m][2 * n + 1], weights[m], {words[2], words[3]});
        }
      }
    }
  }

  __device__ bool is_not_finite(const char* values) const {
    uint32_t sums[2] = {};
#pragma unroll 2
    for (int step = 0; step < kKeyTiles / 2; ++step) {
#pragma unroll 2
      for (int n = 0; n < Shape::kSteps; ++n) {
        uint32_t words[4];
        load_matrices<true>(words, place_of_values(values, step, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i % 2] = mark_not_finite<Value>(words[i], sums[i % 2]);
      }
    }
    const uint32_t marks = mark_not_finite<Value>(sums[0], sums[1]);
    return __any_sync(0xffffffff, (marks & 0x7fff7fff) != 0);
  }

  // What values that are not finite add to the rows that see them; add_values has left them out.
  // They are counted for each row: those of either sign, and those that make NaN.
  __device__ void add_not_finite(int m, int first, const char* values) {
    constexpr uint32_t kInfinity = kInfinityOf<Value>;
#pragma unroll 1
    for (int n = 0; n < 2 * Shape::kSteps; ++n) {
      float positive[4] = {}, negative[4] = {}, wrong[4] = {};
#pragma unroll
      for (int step = 0; step < kKeyTiles / 2; ++step) {
        uint32_t weights[4], zeros[4], words[4], plus[2], minus[2], nan[2], any[2];
        load_weights(m, step, weights);
        find_zeros(m, first, step, zeros);
        load_matrices<true>(words, place_of_values(values, step, n / 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t word = n % 2 == 0 ? words[i] : words[2 + i];
          plus[i] = ones_where<Value>(word, [](uint32_t x) { return x == kInfinity; });
          minus[i] = ones_where<Value>(word, [](uint32_t x) { return x == (kInfinity | 0x8000); });
          nan[i] = ones_where<Value>(word, [](uint32_t x) { return (x & 0x7fff) > kInfinity; });
          any[i] = plus[i] | minus[i] | nan[i];
        }
        multiply_matrices<Value>(positive, weights, plus);
        multiply_matrices<Value>(negative, weights, minus);
        multiply_matrices<Value>(wrong, weights, nan);
        multiply_matrices<Value>(wrong, zeros, any);
      }
#pragma unroll
      for (int k = 0; k < 2 * Shape::kSteps; ++k) {
        if (k != n) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (positive[i] > 0) out_[m][k][i] += INFINITY;
          if (negative[i] > 0) out_[m][k][i] -= INFINITY;
          if (wrong[i] > 0) out_[m][k][i] = NAN;
        }
      }
    }
  }

  // 1 for keys that a row sees and that have no weight: 0 times infinity is NaN.
  __device__ void find_zeros(int m, int first, int step, uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float zeros[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int key = first + step * 16 + i / 2 * 8 + lane() % 4 * 2 + k;
        const bool sees = scoring_[16 * m + 8 * (i % 2)].sees(key);
        zeros[k] = sees && scores_[m][2 * step + i / 2][i % 2 * 2 + k] == 0 ? 1.0f : 0.0f;
      }
      words[i] = rounded_pair<Value>(zeros[0], zeros[1]);
    }
  }

  const PrefillAttention& call_;
  const char* queries_;
  bool is_plain_, is_used_;
  float factor_;  // of scores, as powers of 2
  int first_position_, last_position_;
  RowScoring* scoring_;  // of rows 8 apart
  float largest_[kRows], sum_[kRows];
  static constexpr int kKept = kQueriesInRegisters ? kRowTiles * Shape::kSteps : 1;
  uint32_t kept_[kKept][4];
  float scores_[kRowTiles][kKeyTiles][4];
  float out_[kRowTiles][kWidth / 8][4];
};

}  // namespace dsx::cuda
