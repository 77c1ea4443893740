// decode_attention on CUDA by tensor cores, for keys and values that can be read 16 bytes at a
// time. A block takes a chunk, each of its warps 64 keys of it, and 8 rows of a head: they
// are the columns of what is multiplied, K q and V^T p. While a warp multiplies a tile, those that
// it needs next are on their way, also beyond the end of a unit.
#pragma once

#include "common/cuda/chain.cuh"
#include "transformer/decode_any_cuda.cuh"
#include "transformer/decode_tiles_cuda.cuh"

namespace dsx::cuda {

constexpr int kUnitRows = 8;
constexpr int kTiles = 2, kPartTokens = kTiles * kTileTokens;  // that are weighed together
static_assert(kDecodeWarps == kChunkPages && kPageTokens % kPartTokens == 0);

// Calls do_it<0>() and so on.
template <int kCount, class Do>
__device__ inline void each_tile(const Do& do_it) {
  [&]<int... kTile>(std::integer_sequence<int, kTile...>) {
    (do_it.template operator()<kTile>(), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// What a warp has to do with a unit: tokens 0 to `last` of a page.
struct Share {
  int begin, last;  // begin is the position of the first one; last is -1 if no row sees any
  int page;         // as the table says
};
__device__ inline Share share_of_warp(const DecodeAttention& call, const Unit& unit) {
  if (!unit.there) return {0, -1, 0};
  const int number = unit.chunk * kChunkPages + threadIdx.x / 32, begin = number * kPageTokens;
  if (begin >= unit.length || begin + kPageTokens <= unit.seen_begin) return {0, -1, 0};
  return {begin, ::min(unit.length - begin, kPageTokens) - 1,
          call.kv.table[unit.slot * call.kv.pages_of_slot + number]};
}

// The rows of a unit, in shared memory: their queries as matrices that keys are multiplied by.
template <class K, class Kind, int kWidth, bool kWhole>
struct UnitRows {
  using Tile = cuda::Tile<Kind, kWidth, kWhole>;
  // Rows of a matrix are those of the unit, for the first halves of keys; then again for the
  // second.
  alignas(16) uint32_t words[Tile::kKeySteps][32][4];
  Scoring scoring[kUnitRows];

  // Every thread calls it. What is not there is 0, and sees nothing.
  __device__ void read(const DecodeAttention& call, const Unit& unit) {
    const int64_t rows = unit.count * call.group;
    const auto place_of = [&](int64_t row, int64_t& token, int64_t& head) {
      token = quotient(row, call.group);
      head = unit.head * call.group + row - token * call.group;
    };
    int64_t token, head;
#pragma unroll
    for (int i = threadIdx.x; i < Tile::kKeySteps * 128; i += kDecodeThreads) {
      const int step = i / 128, lane = i / 4 % 32, half = i % 2, word = i / 2 % 2;
      const int64_t row = unit.part * kUnitRows + lane / 4;
      place_of(::min(row, rows - 1), token, head);
      const K* const source = call.q.at<K>(unit.batch, token, head).address;
      uint32_t both = 0;
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int element = Tile::key_element(step, half, word, second, lane % 4);
        if (row < rows && element < call.kv.width) {
          both |= uint32_t(source[element].bits) << (second * 16);
        }
      }
      words[step][lane][i % 4] = both;
    }
    if (threadIdx.x < kUnitRows) {
      const int64_t row = unit.part * kUnitRows + threadIdx.x;
      place_of(row, token, head);
      if (row < rows) {
        scoring[threadIdx.x].read(call, head, unit.position(token));
      } else {
        scoring[threadIdx.x] = {};
      }
    }
  }
};

// A warp's work on its share of each unit. K is the type of products with keys, V of those with
// values. Of a lane, `row` is lane / 4 and `pair` lane % 4: it weighs keys for that row.
template <class K, class Kind, int kWidth, bool kWhole>
class ShareAttention {
  using V = std::conditional_t<Kind::kQuantized, BFloat16, K>;
  using Tile = cuda::Tile<Kind, kWidth, kWhole>;
  static constexpr int kBytes = Tile::kBytes, kSteps = Tile::kValueSteps;
  // Tiles of keys, then those of values, are read in turn; so many are on their way.
  static constexpr int kAhead = Tile::kWords > 32 ? 1 : Tile::kWords > 16 ? 2 : 4;
  static constexpr int kTurns = 2 * kTiles;

 public:
  using Rows = UnitRows<K, Kind, kWidth, kWhole>;
  static constexpr int kStride = kWidth + 8;  // of what rows have found

  __device__ ShareAttention(const DecodeAttention& call, const Rows& rows)
      : call_(call), rows_(rows), of_token_(int(call.kv.of_token) * kBytes) {}

  // Begins to read the first tiles of the first unit.
  __device__ void begin(const Unit& unit, const Share& share) {
    locate(unit, share);
    each_tile<kAhead>([&]<int kTile>() { read_in_turn<kTile>(); });
  }

  // Works on a share, and begins to read the next one. Leaves sums of values in `found`
  // [kUnitRows, kStride], and of weights, in shared memory.
  __device__ void run(const Unit& unit, const Share& share, const Unit& next_unit,
                      const Share& next, float* found, float* sums, float* largest) {
    const int lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
    float most = -INFINITY, sum = share.last >= 0 && !there_ ? NAN : 0.0f;
#pragma unroll
    for (auto& of_step : out_) {
#pragma unroll
      for (float& each : of_step) each = 0;
    }
    // A loop: unrolled it is no faster.
#pragma unroll 1
    for (int first = 0; first < kPageTokens; first += kPartTokens) {
      const auto go_on = [&] {
        if (first + kPartTokens < kPageTokens) {
          locate_next_part();
        } else {
          locate(next_unit, next);
        }
      };
      if (!there_) {
        go_on();
        each_tile<kAhead>([&]<int kTile>() { read_in_turn<kTile>(); });
        continue;
      }
      each_tile<kTiles>([&]<int kTile>() {
        multiply_keys<kTile>();
        if constexpr (kTile + kAhead == kTurns) go_on();
        read_in_turn<kTile + kAhead>();
      });
      weigh(share.begin + first, most, sum);
      each_tile<kTiles>([&]<int kTile>() {
        take_values<kTile>(unit, share, first);
        if constexpr (kTiles + kTile + kAhead == kTurns) go_on();
        read_in_turn<kTiles + kTile + kAhead>();
      });
    }
    if (pair == 0) {
      sums[row] = sum;
      largest[row] = most;
    }
    const int rows = unit.count * int(call_.group) - unit.part * kUnitRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * pair + i >= rows) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        float* const place = found + (2 * pair + i) * kStride + Tile::value_element(step);
        *reinterpret_cast<float2*>(place) = make_float2(out_[step][i], out_[step][2 + i]);
      }
    }
  }

 private:
  // Finds the keys and values of a share, of which the first part is to be read; there are none if
  // the page cannot be.
  __device__ void locate(const Unit& unit, const Share& share) {
    const PagedKv& kv = call_.kv;
    last_ = share.last;
    there_ = last_ >= 0 && share.page >= 0 && share.page < kv.pages;
    const int64_t place = kv.place(share.page, unit.head, 0) * kBytes;
    keys_ = static_cast<const char*>(kv.keys) + place;
    values_ = static_cast<const char*>(kv.values) + place;
    if constexpr (Kind::kQuantized) scales_ = kv.scale_place(share.page, unit.head, 0);
  }
  __device__ void locate_next_part() {
    last_ -= kPartTokens;
    there_ = there_ && last_ >= 0;
    keys_ += int64_t(kPartTokens) * of_token_;
    values_ += int64_t(kPartTokens) * of_token_;
    if constexpr (Kind::kQuantized) scales_ += kPartTokens;
  }

  // Reads tile number kTurn % kTurns of the part that was located.
  template <int kTurn>
  __device__ void read_in_turn() {
    if (!there_) return;
    constexpr int kFirst = kTurn % kTiles * kTileTokens;
    constexpr bool keys = kTurn % kTurns < kTiles;
    const int bytes = int(call_.kv.width) * kBytes;
    Tile& tile = tiles_[kTurn % kAhead];
    tile.template read<keys>(keys ? keys_ : values_, of_token_, kFirst, last_, bytes);
    if constexpr (Kind::kQuantized) {
      const float* scales = keys ? call_.kv.key_scales : call_.kv.value_scales;
      tile.read_scales(scales + scales_, kFirst, last_);
    }
  }

  template <int kTile>
  __device__ void multiply_keys() {
    const Tile& keys = tiles_[kTile % kAhead];
    float products[Tile::kFours][4] = {};
#pragma unroll
    for (int step = 0; step < Tile::kKeySteps; ++step) {
      const uint4 words = *reinterpret_cast<const uint4*>(rows_.words[step][threadIdx.x % 32]);
      const uint32_t queries[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int four = 0; four < Tile::kFours; ++four) {
        uint32_t matrix[2];
        keys.template key_matrix<K>(four, step, matrix);
        multiply_matrices<K>(products[four], queries, matrix);
      }
    }
#pragma unroll
    for (int four = 0; four < Tile::kFours; ++four) {
      float& weight = weights_[kTile][four];
      weight = products[four][0] + products[four][3];  // of both halves
      if constexpr (Kind::kQuantized) weight *= keys.scales[four];
      if constexpr (std::is_same_v<Kind, Fp8Kv>) {
        if (keys.has_nan_code(four)) weight = NAN;
      }
    }
  }

  // From products to weights of the keys from position `begin` on; what is not seen has none. What
  // was found before gets its share of a largest score that is new.
  __device__ void weigh(int begin, float& most, float& sum) {
    const int lane = threadIdx.x % 32, pair = lane % 4;
    const Scoring scoring = rows_.scoring[lane / 4];
    const bool is_plain = call_.soft_cap <= 0 && call_.alibi_slopes == nullptr;
    float largest = most;
#pragma unroll
    for (int k = 0; k < kPartTokens / 4; ++k) {
      float& score = weights_[k / Tile::kFours][k % Tile::kFours];
      const int key = begin + k * 4 + pair;
      if (is_plain) {
        score = scoring.sees(key) ? score * call_.scale : -INFINITY;
      } else {
        score = scoring.score(call_, score, key);
      }
      largest = larger(largest, score);
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      largest = larger(largest, __shfl_xor_sync(0xffffffff, largest, distance));
    }
    const float shift = shift_of_largest(largest);
    float more = 0;
#pragma unroll
    for (auto& of_tile : weights_) {
#pragma unroll
      for (float& each : of_tile) {
        each = fast_exp_of_negative(each - shift);
        more += each;
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      more += __shfl_xor_sync(0xffffffff, more, distance);
    }
    const float factor = fast_exp_of_negative(most - shift);
    sum = __fmaf_rn(sum, factor, more);
    most = largest;
    if (__all_sync(0xffffffff, factor == 1.0f)) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_row = __shfl_sync(0xffffffff, factor, (2 * pair + i) * 4);
#pragma unroll
      for (auto& of_step : out_) {
        of_step[i] *= of_row;
        of_step[2 + i] *= of_row;
      }
    }
  }

  template <int kTile>
  __device__ void take_values(const Unit& unit, const Share& share, int first) {
    Tile& values = tiles_[(kTiles + kTile) % kAhead];
    const int begin = share.begin + first + kTile * kTileTokens;
    if constexpr (Kind::kQuantized) {
      const Scoring scoring = rows_.scoring[threadIdx.x % 32 / 4];
#pragma unroll
      for (int four = 0; four < Tile::kFours; ++four) {
        float& weight = weights_[kTile][four];
        const int key = begin + four * 4 + int(threadIdx.x) % 4;
        weight = scoring.sees(key) ? weight * values.scales[four] : 0.0f;
      }
    }
    // Some of the rows do not see these tokens; what is not finite must not reach them.
    const bool edge = begin < unit.seen_by_last || begin + kTileTokens > unit.position(0) + 1;
    if (edge || std::is_same_v<Kind, Fp8Kv>) {
      if (__any_sync(0xffffffff, values.template set_apart<V>())) {
        add_set_apart<kTile>(unit, share, first);
      }
    }
    const float (&weights)[4] = weights_[kTile];
    const uint32_t matrix[2] = {packed<V>(weights[0], weights[1]),
                                packed<V>(weights[2], weights[3])};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t words[4];
      values.template value_matrix<V>(step, words);
      multiply_matrices<V>(out_[step], words, matrix);
    }
  }

  // Adds the values of a tile that are not finite to the rows that see them.
  template <int kTile>
  __device__ void add_set_apart(const Unit& unit, const Share& share, int first) {
    const int pair = threadIdx.x % 4;
    const int64_t page = call_.kv.place(share.page, unit.head, 0);
#pragma unroll 1
    for (int token = 0; token < kTileTokens; ++token) {
      const int number = first + kTile * kTileTokens + token;
      const int64_t at = page + number * call_.kv.of_token;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&mine)[4] = weights_[kTile];
        const float low = token < 4 ? mine[0] : mine[1], high = token < 12 ? mine[2] : mine[3];
        const float weight =
            __shfl_sync(0xffffffff, token < 8 ? low : high, (2 * pair + i) * 4 + token % 4);
        if (!rows_.scoring[2 * pair + i].sees(share.begin + number)) continue;
#pragma unroll
        for (int step = 0; step < 2 * kSteps; ++step) {
          const int element = Tile::value_element(step / 2) + step % 2;
          if (element >= call_.kv.width) continue;
          const float value = element_at<Kind>(call_.kv.values, call_.kv.dtype, at + element);
          if (!isfinite(value)) out_[step / 2][step % 2 * 2 + i] += weight * value;
        }
      }
      __syncwarp();
    }
  }

  const DecodeAttention& call_;
  const Rows& rows_;
  int of_token_;  // bytes
  // The part that was located last.
  bool there_;
  int last_;
  const char *keys_, *values_;
  int64_t scales_;
  Tile tiles_[kAhead];
  float weights_[kTiles][Tile::kFours];  // of keys number `pair` of each four
  float out_[kSteps][4];
};

// Puts together what the warps have found for the rows of a unit, in the order of their keys.
template <int kWidth, int kStride>
__device__ inline void store_unit(const DecodeAttention& call, const Partials& partials,
                                  const Unit& unit, const float* found,
                                  const float (&sums)[kDecodeWarps][kUnitRows],
                                  const float (&largest)[kDecodeWarps][kUnitRows]) {
  const int64_t rows = unit.count * call.group - unit.part * kUnitRows;
  const int64_t padded = padded_width(call.kv.width);
  for (int i = threadIdx.x; i < kUnitRows * kWidth / 2; i += kDecodeThreads) {
    const int row = i / (kWidth / 2), k = i % (kWidth / 2) * 2;
    if (row >= rows) return;
    if (k >= padded) continue;
    float most = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) most = larger(most, largest[warp][row]);
    const float shift = shift_of_largest(most);
    float2 value = {};
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      const float share = fast_exp_of_negative(largest[warp][row] - shift);
      const float2 each =
          *reinterpret_cast<const float2*>(found + (warp * kUnitRows + row) * kStride + k);
      value.x = __fmaf_rn(share, each.x, value.x);
      value.y = __fmaf_rn(share, each.y, value.y);
      sum = __fmaf_rn(share, sums[warp][row], sum);
    }
    float* partial =
        partials.at(unit.batch, call.kv.heads, unit.head, unit.index, unit.part * kUnitRows + row);
    *reinterpret_cast<float2*>(partial + k) = value;
    if (k == 0) {
      partial[padded] = sum;
      partial[padded + 1] = most;
    }
  }
}

template <class K, class Kind, int kWidth, bool kWhole>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    decode_mma_kernel(const __grid_constant__ DecodeAttention call,
                      const __grid_constant__ Partials partials) {
  using Attention = ShareAttention<K, Kind, kWidth, kWhole>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ Units units;
  __shared__ typename Attention::Rows rows;
  __shared__ float sums[kDecodeWarps][kUnitRows], largest[kDecodeWarps][kUnitRows];
  float* const found = reinterpret_cast<float*>(shared_bytes);
  wait_for_previous();
  let_next_begin();
  const int warp = threadIdx.x / 32;
  const int parts = int(call.rows() + kUnitRows - 1) / kUnitRows;
  units.begin(call, parts);
  if (!units.at(0).there) return;
  Attention attention(call, rows);
  Share share = share_of_warp(call, units.at(0));
  attention.begin(units.at(0), share);
  rows.read(call, units.at(0));
  __syncthreads();
  for (int i = 0; units.at(i).there; ++i) {
    const Unit &unit = units.at(i), &next_unit = units.at(i + 1);
    const Share next = share_of_warp(call, next_unit);
    if (threadIdx.x == 0) units.find(call, parts, i + 2);
    __syncwarp();
    attention.run(unit, share, next_unit, next, found + warp * kUnitRows * Attention::kStride,
                  sums[warp], largest[warp]);
    __syncthreads();
    store_unit<kWidth, Attention::kStride>(call, partials, unit, found, sums, largest);
    if (next_unit.there && !next_unit.same_rows) rows.read(call, next_unit);
    share = next;
    __syncthreads();
  }
}

template <int kWidth>
constexpr int kMmaSharedBytes = kDecodeWarps * kUnitRows * (kWidth + 8) * 4;

}  // namespace dsx::cuda
