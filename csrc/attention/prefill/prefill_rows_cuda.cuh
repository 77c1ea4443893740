// What a warp of prefill_attention does on CUDA with the rows that it has and a page of keys and
// values in shared memory, by tensor cores. What a row has found so far is scaled as its largest
// score grows. No row has anything to do with others.
#pragma once

#include "attention/prefill/prefill_tiles_cuda.cuh"
#include "attention/prefill/prefill_tasks_cuda.cuh"

namespace dsx::cuda {

// The rows of a warp: of a lane, rows lane / 4 and 8 further down.
template <class Shape>
class WarpRows {
  using T = typename Shape::T;
  using Value = typename Shape::Value;
  static constexpr int kRowTiles = Shape::kRowTiles, kWidth = Shape::kWidth;
  static constexpr int kRows = 2 * kRowTiles;        // of a lane
  static constexpr int kKeyTiles = kPageTokens / 8;  // of a page
  static constexpr bool kQueriesInRegisters = kWidth * kRowTiles <= 128;

 public:
  // What each row of the block sees is left in `scoring`, shared memory, before a barrier.
  __device__ WarpRows(const PrefillAttention& call, const StripOfRows& strip, unsigned queries,
                      RowScoring* scoring)
      : call_(call),
        queries_(begin_of_rows<Shape>(queries + warp() * Shape::kWarpRows * Shape::kRowBytes)),
        scoring_(scoring + warp() * Shape::kWarpRows + lane() / 4) {
    is_plain_ = call.soft_cap <= 0 && call.alibi_slopes == nullptr && call.scale > 0;
    factor_ = (is_plain_ ? call.scale : 1.0f) * kLog2OfE;
    const int first = first_row(strip);
    is_used_ = first < strip.rows();
    begin_ = int(seen_at(strip.position_of(::min(first, strip.rows() - 1)), call.window).begin);
    last_position_ = strip.position_of(::min(first + Shape::kWarpRows - 1, strip.rows() - 1));
#pragma unroll
    for (int i = 0; i < kRows; ++i) {  // of a row that is not there, what the last one has
      const int row = ::min(first + lane() / 4 + 8 * i, strip.rows() - 1);
      if (lane() % 4 == 0 && group() == 0) {
        scoring_[8 * i] = RowScoring(call, strip.head_of(row), strip.position_of(row));
      }
      largest_[i] = -INFINITY;
      sum_[i] = 0;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) set_to_0(out_[m]);
  }

  // Once queries are there.
  __device__ void keep_queries() {
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) load_queries(i / Shape::kSteps, i % Shape::kSteps, kept_[i]);
    }
  }

  // Whether scores are products with keys, scaled: then nothing is to be done with each of them.
  __device__ bool is_plain() const { return is_plain_; }

  // Takes in the page whose first token is at `first`, in three steps: its keys; their scores; its
  // values. Scales are those of codes. Some rows see nothing of it, or not all, if it is at an
  // edge; with kAll it is not, and scores are plain.
  template <bool kAll>
  __device__ void take_keys(int first, unsigned keys) {
    if (kAll || sees_some_of(first)) multiply_keys(keys);
  }
  template <bool kAll>
  __device__ void take_scores(int first, bool is_edge, const float* scales) {
    if (!kAll && !sees_some_of(first)) return;
    const int key = lane() % 4 * 2;  // and the next one, of 8
    if constexpr (Shape::kCodes) scale_scores(scales + key);
    if constexpr (!kAll) shape_scores(first + key, is_edge);
    find_largest();
  }
  template <bool kAll>
  __device__ void take_values(int first, bool is_edge, unsigned values, const float* scales) {
    if (!kAll && !sees_some_of(first)) return;
    weigh();
    if constexpr (Shape::kCodes) {
      const int key = lane() % 4 * 2;
      scale_scores(scales + key);
      if (!kAll && is_edge) leave_seen(first + key, 0);  // a scale may be NaN
    }
    add_values(begin_of_rows<Shape>(values));
  }

  // Adds values that are not finite, and nothing else, to the rows that see them, whatever their
  // weight, between scores and values.
  __device__ void add_non_finite(int first, const char* values) {
    if (!sees_some_of(first)) return;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll 1
      for (int key = 0; key < kPageTokens; ++key) {
        const char* const source = values + Shape::place_of(key, n) + lane() % 4 * 4;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(source);
        const uint32_t halves = word & non_finite_halves<Value>(word);
        if (halves == 0) continue;
        const float added[2] = {to_float(Value{uint16_t(halves)}),
                                to_float(Value{uint16_t(halves >> 16)})};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const bool sees = scoring_[8 * i].sees(first + key);
          out_[i / 2][n][i % 2 * 2] += sees ? added[0] : 0.0f;
          out_[i / 2][n][i % 2 * 2 + 1] += sees ? added[1] : 0.0f;
        }
      }
    }
  }

  // Adds what the second group of warps has found to what the first one has, which is to be stored.
  // All threads of both call it; `memory` is for what the second one has.
  __device__ void merge(char* memory) {
    const int thread = threadIdx.x % Shape::kThreads;
    float* next = reinterpret_cast<float*>(memory) + thread;
    __syncthreads();
    if (group() == 1) {
      const auto leave = [&](float each) { *next = each, next += Shape::kThreads; };
#pragma unroll
      for (int i = 0; i < kRows; ++i) leave(largest_[i]), leave(sum_[i]);
      for_each_sum([&](float& each, int) { leave(each); });
    }
    __syncthreads();
    __syncthreads();  // racecheck of compute-sanitizer 13.0 does not see the one before
    if (group() == 1) return;
    const auto take = [&] { return next += Shape::kThreads, next[-Shape::kThreads]; };
    float rescales[kRows][2];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float other = take(), largest = ::fmaxf(largest_[i], other);
      const float shift = shift_of_largest(largest);
      rescales[i][0] = fast_exp2((largest_[i] - shift) * factor_);
      rescales[i][1] = fast_exp2((other - shift) * factor_);
      largest_[i] = largest;
      sum_[i] = __fmaf_rn(sum_[i], rescales[i][0], take() * rescales[i][1]);
    }
    for_each_sum([&](float& each, int i) {
      each = __fmaf_rn(each, rescales[i][0], take() * rescales[i][1]);
    });
  }

  __device__ void store(const StripOfRows& strip) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int row = first_row(strip) + lane() / 4 + 8 * i;
      if (row >= strip.rows()) continue;
      const float natural = is_plain_ ? call_.scale : 1.0f;
      const float largest = largest_[i] == -INFINITY ? -INFINITY : largest_[i] * natural;
      const EndOfRow end(call_, strip.head_of(row), largest, sum);
      const int64_t index = strip.index_of(call_, row);
      if (lane() % 4 == 0) call_.lse[index] = end.lse;
      store_row(static_cast<T*>(call_.out) + index * call_.kv.width, i, end.factor);
    }
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32 % Shape::kWarps; }
  __device__ static int group() { return threadIdx.x / Shape::kThreads; }
  __device__ static int first_row(const StripOfRows& strip) {
    return strip.first_row + warp() * Shape::kWarpRows;
  }

  __device__ bool sees_some_of(int first) const {
    return is_used_ && first <= last_position_ && first + kPageTokens > begin_;
  }

  __device__ void store_row(T* out, int i, float factor) {
    const int width = int(call_.kv.width), first = lane() % 4 * 2;
    if (width % 2 == 0) {
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        const float (&sums)[4] = out_[i / 2][n];
        const uint32_t both =
            rounded_pair<T>(sums[i % 2 * 2] * factor, sums[i % 2 * 2 + 1] * factor);
        if (first + n * 8 < width) *reinterpret_cast<uint32_t*>(out + first + n * 8) = both;
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const T each = narrow<T>(out_[i / 2][n][i % 2 * 2 + k] * factor);
        if (first + n * 8 + k < width) out[first + n * 8 + k] = each;
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

  // Calls body(sum, i) for the sums of values of a lane, of its row i.
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

  __device__ void load_queries(int m, int step, uint32_t (&words)[4]) const {
    load_matrices<false>(words, further<Shape>(queries_, m * 16, step));
  }

  __device__ void multiply_keys(unsigned keys) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) set_to_0(scores_[m]);
    const unsigned begin = begin_of_columns<Shape>(keys);
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
        load_matrices<false>(words, further<Shape>(begin, n * 8, step));
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

  __device__ void find_largest() {
    float largest[kRows];
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
      is_same = is_same && largest[i] == largest_[i];
    }
    if (!__all_sync(0xffffffff, is_same)) grow(largest);
  }

  // From scores to weights; what is not seen has none.
  __device__ void weigh() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float shift = -shift_of_largest(largest_[i]) * factor_;
      float sums[2] = {};
      for_each_score(i, [&](float& score, int n) {
        score = fast_exp2(__fmaf_rn(score, factor_, shift));
        sums[n % 2] += score;
      });
      sum_[i] += sums[0] + sums[1];
    }
  }

  // Scales what there is to the largest scores that there are now.
  __device__ void grow(const float (&largest)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float rescale = fast_exp2((largest_[i] - shift_of_largest(largest[i])) * factor_);
      largest_[i] = largest[i];
      sum_[i] *= rescale;
#pragma unroll
      for (auto& each : out_[i / 2]) {
        each[i % 2 * 2] *= rescale;
        each[i % 2 * 2 + 1] *= rescale;
      }
    }
  }

  // From products with keys from number `key` on to scores, which are -inf where nothing is seen.
  // One thing after the other, so that registers hold little else.
  __device__ void shape_scores(int key, bool is_edge) {
    if (!is_plain_) {
      for_each_score([&](float& score, int, int) { score *= call_.scale; });
    }
    if (call_.soft_cap > 0) {
      for_each_score([&](float& score, int, int) { score = capped(score, call_.soft_cap); });
    }
    if (call_.alibi_slopes != nullptr) {
      for_each_score(
          [&](float& score, int i, int n) { score = scoring_[8 * i].biased(score, key + n); });
    }
    if (is_edge) leave_seen(key, -INFINITY);
  }

  // Of scores, or weights, for keys from number `key` on: those of keys not seen become `other`.
  __device__ void leave_seen(int key, float other) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int begin = scoring_[8 * i].begin - key, last = scoring_[8 * i].position - key;
      for_each_score(i,
                     [&](float& score, int n) { score = n >= begin && n <= last ? score : other; });
    }
  }

  // Calls body(score, i, n) for the scores of a lane, of its row i and key n from its first one on.
  template <class Body>
  __device__ void for_each_score(const Body& body) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      for_each_score(i, [&](float& score, int n) { body(score, i, n); });
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

  __device__ void add_values(unsigned values) {
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
      uint32_t weights[kRowTiles][4];  // of 16 keys, as the first factor of a product
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&scores)[4] = scores_[m][2 * step + i / 2];
          weights[m][i] = rounded_pair<Value>(scores[i % 2 * 2], scores[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::kSteps; ++n) {
        uint32_t words[4];
        load_matrices<true>(words, further<Shape>(values, step * 16, n));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_matrices<Value>(out_[m][2 * n], weights[m], {words[0], words[1]});
          multiply_matrices<Value>(out_[m][2 * n + 1], weights[m], {words[2], words[3]});
        }
      }
    }
  }

  const PrefillAttention& call_;
  unsigned queries_;  // where a lane loads from
  bool is_plain_, is_used_;
  float factor_;               // of scores, as powers of 2
  int begin_, last_position_;  // of the keys that some row sees
  RowScoring* scoring_;        // of rows 8 apart
  float largest_[kRows], sum_[kRows];
  static constexpr int kKept = kQueriesInRegisters ? kRowTiles * Shape::kSteps : 1;
  uint32_t kept_[kKept][4];
  float scores_[kRowTiles][kKeyTiles][4];
  float out_[kRowTiles][kWidth / 8][4];
};

}  // namespace dsx::cuda
