// What a group of warps of prefill_attention does on CUDA with its 64 rows and the tiles of keys
// and values that have come. The products of a tile's values are made together with those of the
// next tile's keys, and go on while the scores of these become weights.
//
// Of a lane, rows lane / 4 and 8 further down of the 16 of its warp; of these, keys and elements
// 8 n + 2 (lane % 4) and the next one. No row has anything to do with others.
#pragma once

#include "attention/prefill/prefill_warpgroups_tiles_cuda.cuh"

namespace dsx::cuda {

// What rows have found is scaled to a score that is not far below the largest one so far: by less
// than this, as a power of 2. So it is seldom scaled anew.
constexpr float kScoreSlack = 8.0f;

template <class Shape>
class GroupRows {
  using T = typename Shape::T;
  using Value = typename Shape::Value;
  using Pipeline = WarpgroupPipeline<Shape>;
  using Barriers = NumberedBarriers<Shape>;
  using State = StageAndPhase<Shape::kStages>;
  static constexpr int kKeyTiles = Shape::kKeys / 8, kWidthTiles = Shape::kWidth / 8;

 public:
  __device__ GroupRows(const PrefillAttention& call, char* memory, Pipeline& pipeline, int group)
      : call_(call), memory_(memory), pipeline_(pipeline), group_(group) {
    factor_ = call.scale * kLog2OfE;
    if (Shape::kTakesTurns && group == Shape::kGroups - 1) end_turn();  // it is the first one's
  }

  // All that rows of a strip see; then stores what they have found.
  __device__ void attend(const StripOfRows& strip, const SeenTiles<Shape>& tiles) {
    begin_strip(strip);
    wait_for(&pipeline_.queries_full, query_phase_);
    int lacks = 0;
#pragma unroll
    for (int i = 0; i < Pipeline::kQueryWarps; ++i) lacks |= pipeline_.lacks_pages[i];
    begin_tiles(tiles.begin, tiles.end, !tiles.are_whole(tiles.begin));
#pragma unroll 1
    for (int number = tiles.begin + 1; number < tiles.end; ++number) {
      go_on(number, tiles.end, !tiles.are_whole(number));
    }
    release(&pipeline_.queries_empty);
    query_phase_ ^= 1;
    end_tiles();
    if (lacks != 0) {
      const int thread = threadIdx.x - Shape::kOthers * Shape::kGroupThreads;
      store_the_rest(call_, strip, Shape::kRows, true, thread, Shape::kRowThreads);
    } else {
      store(strip);
    }
  }

 private:
  __device__ static int lane() { return thread_here() % 32; }
  __device__ static int row_of_group(int i) {
    return thread_here() / 32 % kGroupWarps * 16 + lane() / 4 + 8 * i;
  }

  __device__ void begin_strip(const StripOfRows& strip) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // a row that is not there sees what the last one does
      const int row = strip.first_row + group_ * Shape::kGroupRows + row_of_group(i);
      position_[i] = strip.position_of(::min(row, strip.rows() - 1));
      largest_[i] = -INFINITY;
      sum_[i] = 0;
    }
#pragma unroll
    for (float& each : out_) each = 0;
  }

  // The first tile: there are no values yet to be added.
  __device__ void begin_tiles(int number, int end, bool is_edge) {
    wait_for_keys();
    begin_products();
    multiply_keys();
    end_batch();
    wait_for_batches<0>();
    use_from_here(scores_);
    make_weights(number, is_edge);
    if (number + 1 < end) wait_for_keys();
    round_weights();
    if (is_edge) look_at_values(number);
  }

  // The next tile, and the values of the one before.
  __device__ void go_on(int number, int end, bool is_edge) {
    begin_turn();
    begin_products();
    multiply_keys();
    end_batch();
    wait_for(&pipeline_.tiles.full[1][values_.stage], values_.phase);
    begin_products();
    add_values();
    end_batch();
    end_turn();
    wait_for_batches<1>();
    use_from_here(scores_);
    const bool grows = make_weights(number, is_edge);
    use_from_here(scores_);
    if (number + 1 < end) wait_for_keys();
    wait_for_batches<0>();
    use_from_here(out_);
    release_values();
    if (__any_sync(0xffffffff, grows)) rescale();
    round_weights();
    if (is_edge) look_at_values(number);
  }

  __device__ void end_tiles() {
    wait_for(&pipeline_.tiles.full[1][values_.stage], values_.phase);
    begin_products();
    add_values();
    end_batch();
    wait_for_batches<0>();
    use_from_here(out_);
    release_values();
  }

  // Products are begun by one group after the other.
  __device__ void begin_turn() const {
    if constexpr (Shape::kTakesTurns) {
      Barriers::meet(Barriers::kTurns + group_, 2 * Shape::kGroupThreads);
    }
  }
  __device__ void end_turn() const {
    if constexpr (Shape::kTakesTurns) {
      const int next = group_ + 1 == Shape::kGroups ? 0 : group_ + 1;
      Barriers::pass(Barriers::kTurns + next, 2 * Shape::kGroupThreads);
    }
  }

  __device__ void wait_for_keys() const {
    wait_for(&pipeline_.tiles.full[0][keys_.stage], keys_.phase);
  }
  // What all lanes have read: scales and values, not by products alone, of which all know the end.
  __device__ void release(Barrier* empty) const {
    __syncwarp();
    if (lane() == 0) arrive(empty);
  }
  __device__ void release_keys() {
    release(&pipeline_.tiles.empty[0][keys_.stage]);
    keys_.advance();
  }
  __device__ void release_values() {
    release(&pipeline_.tiles.empty[1][values_.stage]);
    values_.advance();
  }

  __device__ void multiply_keys() {
    const unsigned near = shared_address(Pipeline::tile(memory_, 0, keys_.stage));
    const uint64_t keys = tma_tile_factors(near);
    const uint64_t queries =
        tma_tile_factors(shared_address(memory_) + unsigned(group_ * Shape::kGroupQueryBytes));
#pragma unroll
    for (int step = 0; step < Shape::kWidth / 16; ++step) {
      const int panel = step / 4, bytes = step % 4 * 32;
      begin_product<T>(scores_, further(queries, panel * Shape::kQueryPanelBytes + bytes),
                       further(keys, panel * Shape::kPanelBytes + bytes), step > 0);
    }
  }

  __device__ void add_values() {
    const unsigned near = shared_address(Pipeline::tile(memory_, 1, values_.stage));
    const uint64_t values = transposed_tile_factors(near, Shape::kPanelBytes);
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      begin_product<Value, true>(out_, weights_[step], further(values, step * 16 * kLineBytes),
                                 true);
    }
  }

  // From products with keys, which are not needed any more, to what values are multiplied by. Tells
  // whether what was found so far is to be scaled by scaling_.
  __device__ bool make_weights(int number, bool is_edge) {
    if constexpr (Shape::kCodes) scale_scores(pipeline_.key_scales[keys_.stage]);
    release_keys();
    const bool grows = weigh(number, is_edge);
    if constexpr (Shape::kCodes) {
      scale_scores(pipeline_.value_scales[value_scales_]);
      release(&pipeline_.value_scales_read[value_scales_]);
      value_scales_ = value_scales_ + 1 == Pipeline::kValueStages ? 0 : value_scales_ + 1;
      if (is_edge) leave_seen(number * Shape::kKeys + lane() % 4 * 2, 0);  // a scale may be NaN
    }
    return grows;
  }

  // By the scales of a tile's codes.
  __device__ void scale_scores(const float* scales) {
    const auto of_lane = reinterpret_cast<const float4*>(scales + lane() % 4 * Shape::kLaneScales);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      const float4 four = of_lane[n / 2];
      const float each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 8; ++k) scores_[n * 4 + k] *= each[k / 4 * 2 + k % 2];
    }
  }

  // From products with keys to weights; what is not seen has none.
  __device__ bool weigh(int number, bool is_edge) {
    if (is_edge) leave_seen(number * Shape::kKeys + lane() % 4 * 2, -INFINITY);
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float largest = largest_score(i);
      const bool is_far = (largest - largest_[i]) * factor_ > kScoreSlack;
      scaling_[i] = is_far ? fast_exp2((largest_[i] - largest) * factor_) : 1.0f;
      largest_[i] = is_far ? largest : largest_[i];
      grows = grows || is_far;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = -shift_of_largest(largest_[i]) * factor_;
      float sums[2] = {};
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& score = scores_[n * 4 + i * 2 + k];
          score = fast_exp2(__fmaf_rn(score, factor_, shift));
          sums[k] += score;
        }
      }
      sum_[i] = __fmaf_rn(sum_[i], scaling_[i], sums[0] + sums[1]);
    }
    return grows;
  }

  // Of a row of a lane, in this tile.
  __device__ float largest_score(int i) const {
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) largest[k] = ::fmaxf(largest[k], scores_[n * 4 + i * 2 + k]);
    }
    float all = ::fmaxf(largest[0], largest[1]);
    all = ::fmaxf(all, __shfl_xor_sync(0xffffffff, all, 1));
    return ::fmaxf(all, __shfl_xor_sync(0xffffffff, all, 2));
  }

  // Of scores, or weights, for keys from number `key` on: those of keys not seen become `other`.
  __device__ void leave_seen(int key, float other) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int begin = int(seen_at(position_[i], call_.window).begin) - key;
      const int last = position_[i] - key;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& score = scores_[n * 4 + i * 2 + k];
          score = n * 8 + k >= begin && n * 8 + k <= last ? score : other;
        }
      }
    }
  }

  __device__ void rescale() {
#pragma unroll
    for (int n = 0; n < kWidthTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[n * 4 + i] *= scaling_[i / 2];
    }
  }

  // As the first factor of a product with values.
  __device__ void round_weights() {
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = (2 * step + i / 2) * 4 + i % 2 * 2;
        weights_[step][i] = rounded_pair<Value>(scores_[first], scores_[first + 1]);
      }
    }
  }

  // Of a tile that some rows of the block do not see, or not all of it: values that are not finite
  // must not reach those. They are added to the rows that see them, and become 0. All groups come
  // here with the same tile.
  __device__ void look_at_values(int number) {
    if constexpr (std::is_same_v<typename Shape::Kind, Int8Kv>) return;  // all are finite
    wait_for(&pipeline_.tiles.full[1][values_.stage], values_.phase);
    char* const tile = Pipeline::tile(memory_, 1, values_.stage);
    const int thread = thread_here() % Shape::kGroupThreads;
    bool found = false;
#pragma unroll 2
    for (int i = thread; i < Shape::kTileBytes / 16; i += Shape::kGroupThreads) {
      const uint4 words = reinterpret_cast<const uint4*>(tile)[i];
      found |= (non_finite_halves<Value>(words.x) | non_finite_halves<Value>(words.y) |
                non_finite_halves<Value>(words.z) | non_finite_halves<Value>(words.w)) != 0;
    }
    found = Barriers::meet_with_any(Barriers::kOfGroup + group_, Shape::kGroupThreads, found);
    if (!found) return;
    add_non_finite(number * Shape::kKeys, tile);
    constexpr int kAll = Shape::kRowThreads;
    Barriers::meet(Barriers::kRows, kAll);
    const auto words = reinterpret_cast<uint32_t*>(tile);
#pragma unroll 1
    for (int i = group_ * Shape::kGroupThreads + thread; i < Shape::kTileBytes / 4; i += kAll) {
      words[i] &= ~non_finite_halves<Value>(words[i]);
    }
    wrote_before_fetch();  // products read by the engine's way, too
    Barriers::meet(Barriers::kRows, kAll);
  }

  // Adds values that are not finite, and nothing else, whatever their weight.
  __device__ void add_non_finite(int first, const char* tile) {
#pragma unroll
    for (int n = 0; n < kWidthTiles; ++n) {
#pragma unroll 1
      for (int key = 0; key < Shape::kKeys; ++key) {
        const char* const source = tile + Shape::place_of(key, n) + lane() % 4 * 4;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(source);
        const uint32_t halves = word & non_finite_halves<Value>(word);
        if (halves == 0) continue;
        const float added[2] = {to_float(Value{uint16_t(halves)}),
                                to_float(Value{uint16_t(halves >> 16)})};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const Seen seen = seen_at(position_[i], call_.window);
          const bool sees = first + key >= seen.begin && first + key < seen.end;
          out_[n * 4 + i * 2] += sees ? added[0] : 0.0f;
          out_[n * 4 + i * 2 + 1] += sees ? added[1] : 0.0f;
        }
      }
    }
  }

  __device__ void store(const StripOfRows& strip) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sum_[i];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      const int row = strip.first_row + group_ * Shape::kGroupRows + row_of_group(i);
      if (row >= strip.rows()) continue;
      const float largest = largest_[i] == -INFINITY ? -INFINITY : largest_[i] * call_.scale;
      const EndOfRow end(call_, strip.head_of(row), largest, sum);
      const int64_t index = strip.index_of(call_, row);
      if (lane() % 4 == 0) call_.lse[index] = end.lse;
      store_row(static_cast<T*>(call_.out) + index * call_.kv.width, i, end.factor);
    }
  }

  __device__ void store_row(T* out, int i, float factor) const {
    const int width = int(call_.kv.width), first = lane() % 4 * 2;
    const bool in_pairs = width % 2 == 0;
#pragma unroll
    for (int n = 0; n < kWidthTiles; ++n) {
      const int at = first + n * 8;
      const float (&sums)[kSums] = out_;
      const uint32_t both =
          rounded_pair<T>(sums[n * 4 + i * 2] * factor, sums[n * 4 + i * 2 + 1] * factor);
      if (in_pairs) {
        if (at < width) *reinterpret_cast<uint32_t*>(out + at) = both;
      } else {
        if (at < width) out[at] = T{uint16_t(both)};
        if (at + 1 < width) out[at + 1] = T{uint16_t(both >> 16)};
      }
    }
  }

  static constexpr int kSums = Shape::kWidth / 2;

  const PrefillAttention& call_;
  char* const memory_;
  Pipeline& pipeline_;
  const int group_;
  float factor_;  // of scores, as powers of 2
  State keys_, values_;
  int query_phase_ = 0, value_scales_ = 0;
  int position_[2];
  float largest_[2], sum_[2], scaling_[2];
  float scores_[Shape::kKeys / 2];
  uint32_t weights_[Shape::kKeys / 16][4];
  float out_[kSums];
};

}  // namespace dsx::cuda
