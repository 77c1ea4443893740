// What a warp of prefill_attention does on CUDA with the rows that it has and a page of keys and
// values in shared memory, by tensor cores. What a row has found so far is scaled as its largest
// score grows. No row has anything to do with others.
#pragma once

#include "transformer/mma_cuda.cuh"
#include "transformer/prefill_work_cuda.cuh"

namespace dsx::cuda {

// For heads of up to kWidth elements, a block of kWarps with kRowTiles times 16 rows each. Codes
// come as they are, and are then widened to 16 bits: of keys to the type of queries, of values,
// whose weights take their scales and may be tiny, to bfloat16.
template <class T, class Stored, int kWidth, int kWarps, int kRowTiles>
struct PrefillShape {
  static constexpr bool kCodes = sizeof(Stored) == 1;
  using Value = std::conditional_t<kCodes, BFloat16, T>;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kWarpRows = 16 * kRowTiles, kRows = kWarps * kWarpRows;
  static constexpr int kWidthOfTile = kWidth;
  static constexpr int kSteps = kWidth / 16;  // of 16 elements of a head
  static constexpr int kQueryBytes = kRows * kWidth * 2;
  static constexpr int kTileBytes = kPageTokens * kWidth * 2;
  static constexpr int kCodeBytes = kPageTokens * kWidth;
  static constexpr int kScaleBytes = kPageTokens * 4;
  static constexpr int kStageBytes = 2 * (kCodes ? kCodeBytes + kScaleBytes : kTileBytes);
  static constexpr int shared_bytes(int stages) {
    return kQueryBytes + stages * kStageBytes + (kCodes ? 2 * kTileBytes : 0);
  }

  // Where chunk number `chunk`, of 8 elements, of a row of a tile is: neighbouring rows have the
  // same one in different banks.
  __device__ static int place_of(int row, int chunk) {
    return row * (kWidth * 2) + ((chunk ^ (row & 7)) * 16);
  }
};

// Two floats as the halves of a word, the first one lower; one instruction.
template <class T>
__device__ inline uint32_t rounded_pair(float first, float second) {
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// NaN in a half if that of `sum` was, or that of the word is not finite.
template <class T>
__device__ inline uint32_t mark_not_finite(uint32_t word, uint32_t sum) {
#if __CUDA_ARCH__ >= 800
  uint32_t result;
  if constexpr (T::kQuietNan == BFloat16::kQuietNan) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0), "r"(sum));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(0), "r"(sum));
  }
  return result;
#else
  return word | sum;
#endif
}

template <class T>
constexpr uint32_t kInfinityOf = T::kQuietNan == BFloat16::kQuietNan ? 0x7f80 : 0x7c00;

// All bits of the halves of a word that are not finite.
template <class T>
__device__ inline uint32_t not_finite_halves(uint32_t word) {
  constexpr uint32_t kInfinity = kInfinityOf<T>;
  const uint32_t low = (word & kInfinity) == kInfinity ? 0xffff : 0;
  return low | ((word >> 16 & kInfinity) == kInfinity ? 0xffff0000u : 0);
}

// Of each half of a word: 1 if it is what `is` says of its 16 bits, else 0.
template <class T, class Is>
__device__ inline uint32_t ones_where(uint32_t word, const Is& is) {
  constexpr uint32_t kOne = T::kQuietNan == BFloat16::kQuietNan ? 0x3f80 : 0x3c00;
  return (is(word & 0xffff) ? kOne : 0) | (is(word >> 16) ? kOne << 16 : 0);
}

// The rows of a warp: of a lane, rows lane / 4 and 8 further down.
template <class T, class Stored, int kWidth, int kWarps, int kRowTiles>
class WarpRows {
  using Shape = PrefillShape<T, Stored, kWidth, kWarps, kRowTiles>;
  using Value = typename Shape::Value;
  // Keys are taken in by so many, in tiles of 8: as many as there are registers for.
  static constexpr int kKeyTiles = kRowTiles == 1 ? 8 : 4, kKeys = 8 * kKeyTiles;
  static constexpr bool kQueriesInRegisters = kWidth * kRowTiles <= 128;

 public:
  // What each row of the block sees is left in `scoring`, shared memory.
  __device__ WarpRows(const PrefillAttention& call, const StripOfRows& strip, const char* queries,
                      RowScoring* scoring)
      : call_(call),
        queries_(queries + threadIdx.x / 32 * Shape::kWarpRows * kWidth * 2),
        scoring_(scoring + threadIdx.x / 32 * Shape::kWarpRows + lane() / 4) {
    is_plain_ = call.soft_cap <= 0 && call.alibi_slopes == nullptr && call.scale > 0;
    factor_ = (is_plain_ ? call.scale : 1.0f) * kLog2OfE;
    const int64_t first = first_row(strip);
    is_used_ = first < strip.rows();
    first_position_ = int(strip.position_of(::min(first, strip.rows() - 1)));
    last_position_ = int(strip.position_of(::min(first + Shape::kWarpRows - 1, strip.rows() - 1)));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {  // of a row that is not there, what the last one has
      const int64_t row = ::min(first + lane() / 4 + 8 * i, strip.rows() - 1);
      if (lane() % 4 == 0) {
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

  // Takes in the page whose first token is at `first`; scales are those of codes.
  __device__ void take_page(int first, const char* keys, const char* values,
                            const float* key_scales, const float* value_scales) {
#pragma unroll 1
    for (int i = 0; i < kPageTokens; i += kKeys) {
      const int place = i * kWidth * 2;
      take(first + i, keys + place, values + place, key_scales + i, value_scales + i);
    }
  }

  __device__ void store(const StripOfRows& strip) {
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
  __device__ static int64_t first_row(const StripOfRows& strip) {
    return strip.first_row + threadIdx.x / 32 * Shape::kWarpRows;
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

  __device__ void multiply_keys(const char* keys) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) set_to_0(scores_[m]);
    const int token = lane() % 8 + lane() / 16 * 8, half = lane() / 8 % 2;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      uint32_t loaded[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if constexpr (!kQueriesInRegisters) load_queries(m, step, loaded[m]);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t words[4];
        load_matrices<false>(words, keys + Shape::place_of(n * 8 + token, 2 * step + half));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int kept = m * Shape::kSteps + step;
          const uint32_t (&q)[4] = kQueriesInRegisters ? kept_[kept % kKept] : loaded[m];
          multiply_matrices<T>(scores_[m][n], q, {words[0], words[1]});
          multiply_matrices<T>(scores_[m][n + 1], q, {words[2], words[3]});
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
