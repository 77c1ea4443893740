// decode_attention on CUDA by tensor cores, for keys and values of 16 bits that can be read 16
// bytes at a time. A block takes a chunk, each of its four warps a page of it, and 8 rows of a
// head: they are the columns of what is multiplied, K q and V^T p, so that keys and values are read
// as they lie. A warp has its own ring of tiles of 16 tokens in shared memory, which are on their
// way long before they are needed, also beyond the end of a unit.
#pragma once

#include "common/cuda/fetch.cuh"
#include "transformer/decode_work_cuda.cuh"
#include "transformer/mma_cuda.cuh"

namespace dsx::cuda {

constexpr int kTileTokens = 16, kTiles = kPageTokens / kTileTokens;
constexpr int kUnitRows = 8;

// For heads of up to kWidth elements; as many stages as keep 40 KiB on their way.
template <int kWidth>
struct MmaShape {
  static constexpr int kStages = kWidth <= 64 ? 8 : kWidth <= 128 ? 5 : 3;
  static constexpr int kTileBytes = kTileTokens * kWidth * 2;
  static constexpr int kRingBytes = kDecodeWarps * kStages * kTileBytes;
  static constexpr int kSharedBytes = kRingBytes + kDecodeWarps * kUnitRows * kWidth * 4;
  static constexpr int kSteps = kWidth / 16;  // of 16 elements of a head
};

// What a warp has to do with its page of a unit: tiles [first, end).
struct PageOfWarp {
  int64_t begin;  // position of its first token
  int64_t place;  // of its first element
  int first, end;
  bool wrong;
};
__device__ inline PageOfWarp page_of_warp(const DecodeAttention& call, const Unit& unit) {
  const int64_t number = unit.chunk * kChunkPages + threadIdx.x / 32;
  PageOfWarp page{number * kPageTokens, 0, 0, 0, false};
  const int64_t seen = seen_at(unit.sequence.position(0), call.window).begin;
  if (page.begin >= unit.sequence.length || page.begin + kPageTokens <= seen) return page;
  const int64_t index = call.kv.page_of(unit.sequence.slot, number);
  page.wrong = index < 0;
  if (page.wrong) return page;
  page.place = call.kv.place(index, unit.head, 0);
  page.first = int(::max(seen - page.begin, int64_t(0))) / kTileTokens;
  const int64_t tokens = ::min(unit.sequence.length - page.begin, int64_t(kPageTokens));
  page.end = int(tokens + kTileTokens - 1) / kTileTokens;
  return page;
}

// Fetches the tiles of all units of a warp in their order: keys of a page, then its values.
template <class T, int kWidth>
class TileFetcher {
  using Shape = MmaShape<kWidth>;

 public:
  __device__ TileFetcher(const DecodeAttention& call, const Units& units, char* ring)
      : call_(call), units_(units), ring_(ring) {}

  // Begins to fetch the next tile, if there is one, and ends a group of copies.
  __device__ void fetch_next() {
    while (tile_ == tiles_ && !units_.done()) {
      const Unit unit = units_.take();
      page_ = page_of_warp(call_, unit);
      length_ = unit.sequence.length;
      tile_ = 0;
      tiles_ = 2 * (page_.end - page_.first);
    }
    if (tile_ < tiles_) fetch_tile();
    end_fetches();
  }

  // Where chunk number `chunk`, of 16 bytes, of a token of a tile is: neighbouring tokens have the
  // same one in different banks.
  __device__ static int place_of(int token, int chunk) {
    return token * (kWidth * 2) + ((chunk ^ (token & 7)) * 16);
  }

 private:
  __device__ void fetch_tile() {
    const int half = tiles_ / 2;
    const bool keys = tile_ < half;
    const int first = (page_.first + (keys ? tile_ : tile_ - half)) * kTileTokens;
    const T* source = static_cast<const T*>(keys ? call_.kv.keys : call_.kv.values) + page_.place;
    char* const target = ring_ + stage_ * Shape::kTileBytes;
    constexpr int kChunks = kWidth / 8;
#pragma unroll
    for (int i = 0; i < kTileTokens * kChunks / 32; ++i) {
      const int number = i * 32 + threadIdx.x % 32;
      const int token = number / kChunks, chunk = number % kChunks;
      const int64_t left = call_.kv.width - chunk * 8;
      const bool there = left > 0 && page_.begin + first + token < length_;
      const int bytes = !there ? 0 : left < 8 ? int(left) * 2 : 16;
      const T* from = there ? source + (first + token) * call_.kv.of_token + chunk * 8 : source;
      fetch_part(target + place_of(token, chunk), from, bytes);
    }
    ++tile_;
    stage_ = stage_ + 1 == Shape::kStages ? 0 : stage_ + 1;
  }

  const DecodeAttention& call_;
  Units units_;
  char* ring_;
  PageOfWarp page_ = {};
  int64_t length_ = 0;
  int tile_ = 0, tiles_ = 0, stage_ = 0;
};

// A warp's work on its page of each unit. Of the 8 rows of a unit, a lane has queries number
// 2 pair and 2 pair + 1.
template <class T, int kWidth>
class PageAttention {
  using Shape = MmaShape<kWidth>;
  using Fetcher = TileFetcher<T, kWidth>;

 public:
  __device__ PageAttention(const DecodeAttention& call, const Units& units, char* ring)
      : call_(call), fetcher_(call, units, ring), ring_(ring) {
    for (int i = 0; i < Shape::kStages - 1; ++i) fetcher_.fetch_next();
  }

  // Leaves sums of values in `found` [kUnitRows, kWidth], and of weights, in shared memory.
  __device__ void run(const Unit& unit, float* found, float* sums, float* largest) {
    const PageOfWarp page = page_of_warp(call_, unit);
    const int lane = threadIdx.x % 32;
    read_queries(unit);
    multiply_keys(page);
    float most[2], sum[2];
    weigh(unit, page, most, sum);
    take_values(unit, page);
    const int row = lane / 4, pair = lane % 4;
#pragma unroll
    for (int m = 0; m < Shape::kSteps; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        found[(2 * pair + i % 2) * kWidth + m * 16 + row + i / 2 * 8] = out_[m][i];
      }
    }
    if (row == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[2 * pair + i] = page.wrong ? NAN : sum[i];
        largest[2 * pair + i] = most[i];
      }
    }
  }

 private:
  // Waits for the next tile and asks for one more, which takes the place of the last one.
  __device__ const char* next_tile() {
    wait_for_fetches<Shape::kStages - 2>();
    __syncwarp();
    fetcher_.fetch_next();
    const char* tile = ring_ + stage_ * Shape::kTileBytes;
    stage_ = stage_ + 1 == Shape::kStages ? 0 : stage_ + 1;
    return tile;
  }

  // Those of this unit, unless they are those of the last one. All loads are on their way together:
  // what is not there is read where something is.
  __device__ void read_queries(const Unit& unit) {
    const int64_t number = (unit.batch * call_.kv.heads + unit.head) * call_.rows() + unit.part;
    if (number == number_of_queries_) return;
    number_of_queries_ = number;
    const int lane = threadIdx.x % 32, pair = lane % 4;
    const int64_t rows = unit.sequence.count * call_.group;
    const int64_t mine = unit.part * kUnitRows + lane / 4;
    const int64_t row = ::min(mine, rows - 1), token = quotient(row, call_.group);
    const int64_t head = unit.head * call_.group + row - token * call_.group;
    const T* const source = call_.q.at<T>(unit.batch, token, head).address;
    const int width = int(call_.kv.width);
    T elements[Shape::kSteps][2][2];
#pragma unroll
    for (int i = 0; i < Shape::kSteps * 4; ++i) {
      const int place = i / 4 * 16 + i / 2 % 2 * 8 + 2 * pair + i % 2;
      elements[i / 4][i / 2 % 2][i % 2] = source[::min(place, width - 1)];
    }
#pragma unroll
    for (int i = 0; i < Shape::kSteps * 2; ++i) {
      const int place = i / 2 * 16 + i % 2 * 8 + 2 * pair;
      const T(&both)[2] = elements[i / 2][i % 2];
      const uint32_t first = mine < rows && place < width ? both[0].bits : 0;
      const uint32_t second = mine < rows && place + 1 < width ? both[1].bits : 0;
      queries_[i / 2][i % 2] = first | second << 16;
    }
  }

  __device__ void multiply_keys(const PageOfWarp& page) {
    const int lane = threadIdx.x % 32, token = lane % 16, chunk = lane / 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (float& each : scores_[tile]) each = 0;
      if (tile < page.first || tile >= page.end) continue;
      const char* keys = next_tile();
#pragma unroll
      for (int step = 0; step < Shape::kSteps; ++step) {
        uint32_t words[4];
        load_matrices<false>(words, keys + Fetcher::place_of(token, 2 * step + chunk));
        multiply_matrices<T>(scores_[tile], words, queries_[step]);
      }
    }
  }

  // From products to weights; what is not seen has none.
  __device__ void weigh(const Unit& unit, const PageOfWarp& page, float (&most)[2],
                        float (&sum)[2]) {
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t mine = unit.part * kUnitRows + 2 * pair + i;
      const bool there = mine < unit.sequence.count * call_.group;
      const int64_t token = quotient(mine, call_.group);
      const int64_t head = unit.head * call_.group + mine - token * call_.group;
      if (there) {
        scoring_[i] = Scoring(call_, head, unit.sequence.position(token));
      } else {
        scoring_[i].begin = scoring_[i].end = 0;
      }
      most[i] = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = int(page.begin) + tile * kTileTokens + half * 8 + row;
          float& score = scores_[tile][2 * half + i];
          const bool used = there && tile >= page.first && tile < page.end;
          score = used ? scoring_[i](score, 1.0f, key) : -INFINITY;
          most[i] = larger(most[i], score);
        }
      }
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        most[i] = larger(most[i], __shfl_xor_sync(0xffffffff, most[i], distance));
      }
      const float shift = shift_of_largest(most[i]);
      sum[i] = 0;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores_[tile][2 * half + i];
          score = fast_exp_of_negative(score - shift);
          sum[i] += score;
        }
      }
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum[i] += __shfl_xor_sync(0xffffffff, sum[i], distance);
      }
    }
  }

  __device__ void take_values(const Unit& unit, const PageOfWarp& page) {
#pragma unroll
    for (auto& of_step : out_) {
#pragma unroll
      for (float& each : of_step) each = 0;
    }
    const int lane = threadIdx.x % 32;
    const int token = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
    // Some of the rows do not see these tokens; what is not finite must not reach them.
    const Seen last = seen_at(unit.sequence.length - 1, call_.window);
    const int64_t all_end = unit.sequence.position(0) + 1;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile < page.first || tile >= page.end) continue;
      char* values = const_cast<char*>(next_tile());
      const int64_t begin = page.begin + tile * kTileTokens;
      if (begin < last.begin || begin + kTileTokens > all_end) set_apart(begin, tile, values);
      const uint32_t weights[2] = {
          transposed_matrix(packed<T>(scores_[tile][0], scores_[tile][1])),
          transposed_matrix(packed<T>(scores_[tile][2], scores_[tile][3]))};
#pragma unroll
      for (int step = 0; step < Shape::kSteps; ++step) {
        uint32_t words[4];
        load_matrices<true>(words, values + Fetcher::place_of(token, 2 * step + chunk));
        multiply_matrices<T>(out_[step], words, weights);
      }
    }
  }

  // Adds the values of a tile that are not finite to the rows that see them, and makes them 0.
  __device__ void set_apart(int64_t begin, int tile, char* values) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    bool found = false;
    for (int i = lane; i < kTileTokens * kWidth; i += 32) {
      const T* value = reinterpret_cast<const T*>(
          values + Fetcher::place_of(i / kWidth, i % kWidth / 8) + i % 8 * 2);
      found |= !isfinite(widen(*value));
    }
    if (!__any_sync(0xffffffff, found)) return;
    for (int token = 0; token < kTileTokens; ++token) {
      const int source = token % 8 * 4 + lane % 4;  // the lane that has the weights
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float low = scores_[0][i], high = scores_[0][2 + i];
#pragma unroll
        for (int k = 1; k < kTiles; ++k) {
          low = k == tile ? scores_[k][i] : low;
          high = k == tile ? scores_[k][2 + i] : high;
        }
        const float weight = __shfl_sync(0xffffffff, token < 8 ? low : high, source);
        if (!scoring_[i].sees(int(begin) + token)) continue;
#pragma unroll
        for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float value = widen(*reinterpret_cast<const T*>(
                values + Fetcher::place_of(token, 2 * step + half) + row * 2));
            if (!isfinite(value)) out_[step][2 * half + i] += weight * value;
          }
        }
      }
      __syncwarp();
    }
    for (int i = lane; i < kTileTokens * kWidth; i += 32) {
      T* value =
          reinterpret_cast<T*>(values + Fetcher::place_of(i / kWidth, i % kWidth / 8) + i % 8 * 2);
      if (!isfinite(widen(*value))) *value = T{0};
    }
    __syncwarp();
  }

  const DecodeAttention& call_;
  Fetcher fetcher_;
  char* ring_;
  int stage_ = 0;
  int64_t number_of_queries_ = -1;
  uint32_t queries_[Shape::kSteps][2];
  float scores_[kTiles][4];
  float out_[Shape::kSteps][4];
  Scoring scoring_[2];
};

// Puts together what four warps have found for the rows of a unit, in the order of their pages.
template <int kWidth>
__device__ inline void store_unit(const DecodeAttention& call, const Partials& partials,
                                  const Unit& unit, const float* found,
                                  const float (&sums)[kDecodeWarps][kUnitRows],
                                  const float (&largest)[kDecodeWarps][kUnitRows]) {
  const int64_t rows = unit.sequence.count * call.group - unit.part * kUnitRows;
  const int64_t padded = padded_width(call.kv.width);
  for (int i = threadIdx.x; i < kUnitRows * kWidth; i += kDecodeThreads) {
    const int row = i / kWidth, k = i % kWidth;
    if (row >= rows || k >= padded) continue;
    float most = -INFINITY;
    for (int warp = 0; warp < kDecodeWarps; ++warp) most = larger(most, largest[warp][row]);
    const float shift = shift_of_largest(most);
    float value = 0, sum = 0;
#pragma unroll
    for (int warp = 0; warp < kDecodeWarps; ++warp) {
      const float share = fast_exp_of_negative(largest[warp][row] - shift);
      value = __fmaf_rn(share, found[warp * kUnitRows * kWidth + i], value);
      sum = __fmaf_rn(share, sums[warp][row], sum);
    }
    float* partial =
        partials.at(unit.batch, call.kv.heads, unit.head, unit.chunk, unit.part * kUnitRows + row);
    partial[k] = value;
    if (k == 0) {
      partial[padded] = sum;
      partial[padded + 1] = most;
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kDecodeThreads, kWidth <= 128 ? 2 : 1)
    decode_mma_kernel(const __grid_constant__ DecodeAttention call,
                      const __grid_constant__ Partials partials) {
  using Shape = MmaShape<kWidth>;
  extern __shared__ __align__(128) char shared_bytes[];
  __shared__ int64_t unit_sums[kDecodeWarps];
  __shared__ float sums[kDecodeWarps][kUnitRows], largest[kDecodeWarps][kUnitRows];
  float* const found = reinterpret_cast<float*>(shared_bytes + Shape::kRingBytes);
  const int warp = threadIdx.x / 32;
  const int64_t parts = (call.rows() + kUnitRows - 1) / kUnitRows;
  Units units(call, parts);
  units.find_share(unit_sums);
  PageAttention<T, kWidth> attention(call, units,
                                     shared_bytes + warp * Shape::kStages * Shape::kTileBytes);
  while (!units.done()) {
    const Unit unit = units.take();
    attention.run(unit, found + warp * kUnitRows * kWidth, sums[warp], largest[warp]);
    __syncthreads();
    store_unit<kWidth>(call, partials, unit, found, sums, largest);
    __syncthreads();
  }
  wait_for_fetches<0>();
}

}  // namespace dsx::cuda
