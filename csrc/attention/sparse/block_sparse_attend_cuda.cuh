// block_sparse_attention on CUDA by tensor cores: what a warp does with its rows and tiles of keys
// and values, and the kernel. What a row has found so far is scaled as its largest score grows.
#pragma once

#include "common/cuda/floats.cuh"
#include "attention/sparse/block_sparse_tiles_cuda.cuh"

namespace dsx::cuda {

// The rows of a warp: of a lane, rows lane / 4 and 8 further down of each 16.
template <class Shape>
class AttendingRows {
  using T = typename Shape::T;
  static constexpr int kRowTiles = Shape::kRowTiles, kWidth = Shape::kWidth;
  static constexpr int kRows = 2 * kRowTiles, kKeyTiles = 2 * Shape::kAtOnce;
  static constexpr bool kKeepsQueries = kWidth * kRowTiles <= 128;
  static constexpr int kKept = kKeepsQueries ? kRowTiles * Shape::kSteps : 1;

 public:
  __device__ AttendingRows(const SparseTask& task, const LaneTile& lanes, unsigned queries)
      : call_(task.call), batch_(lanes.batch), head_(lanes.head) {
    const int warp = threadIdx.x / 32;
    first_ = lanes.first + warp * Shape::kWarpLanes;
    bit_ = warp * Shape::kWarpLanes / call_.block;
    queries_ = queries + warp * Shape::kWarpLanes * Shape::kRowBytes;
    factor_ = (has_masks() ? 1.0f : call_.scale) * kLog2E;
#pragma unroll
    for (int i = 0; i < kRows; ++i) largest_[i] = -INFINITY, sum_[i] = 0;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) set_to_0(out_[m]);
  }

  // Once queries are there.
  __device__ void keep_queries() {
    if constexpr (kKeepsQueries) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) load_queries(i / Shape::kSteps, i % Shape::kSteps, kept_[i]);
    }
  }

  __device__ void take(const Pieces& pieces, unsigned keys, unsigned values) {
    const unsigned seen = __ballot_sync(0xffffffff, (pieces.names >> bit_ & 1) != 0);
#pragma unroll 1
    for (int unit = 0; unit < Shape::kUnits; unit += Shape::kAtOnce) {
      const int piece = unit / Shape::kBlockUnits;
      if ((seen >> piece & 1) == 0) continue;
      const int first =
          __shfl_sync(0xffffffff, pieces.token, piece) + unit % Shape::kBlockUnits * 16;
      if (first >= call_.tokens || (call_.causal && first >= first_ + Shape::kWarpLanes)) continue;
      take_units(first, keys + unit * 16 * Shape::kRowBytes, values + unit * 16 * Shape::kRowBytes);
    }
  }

  __device__ void store(const SparseTask& task) {
    const int64_t head = int64_t(batch_) * call_.heads + head_;
    const int strips = int(ceil_div(call_.tokens, int64_t(16)));
    const float natural = has_masks() ? 1.0f : call_.scale;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      bool bad[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = sum_[2 * m + i];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        const int row = first_ + m * 16 + i * 8 + threadIdx.x % 32 / 4;
        const bool is_there = row < call_.tokens;
        T* const to = static_cast<T*>(call_.out.data) + batch_ * call_.out.of_batch +
                      head_ * call_.out.of_head + row * call_.out.of_token;
        const float factor = sum == 0 ? 0.0f : 1.0f / sum;
        bad[i] = !store_lane(to, int(call_.width), out_[m], i, factor, is_there);
        if (!is_there || threadIdx.x % 4 != 0) continue;
        const float lse = zero_if_none(largest_[2 * m + i]) * natural + ::logf(sum);
        call_.lse[head * call_.tokens + row] = sum == 0 ? -INFINITY : lse;
        bad[i] = bad[i] || !(sum < INFINITY);
      }
      const uint32_t spoiled = rows_marked(bad[0], bad[1]);
      const int strip = first_ / 16 + m;
      if (threadIdx.x % 32 == 0 && strip < strips) task.spoiled[head * strips + strip] = spoiled;
    }
  }

 private:
  __device__ bool has_masks() const { return Shape::kMasks && call_.masks > 0; }

  __device__ void load_queries(int m, int step, uint32_t (&words)[4]) const {
    const unsigned begin = begin_of_rows<Shape>(queries_ + m * 16 * Shape::kRowBytes);
    load_matrices<false>(words, further<Shape>(begin, 0, step));
  }

  // Takes in kAtOnce units of keys, from this one on.
  __device__ void take_units(int first, unsigned keys, unsigned values) {
    multiply_keys(keys);
    const int last = first + 16 * Shape::kAtOnce - 1;
    if (has_masks() || last >= call_.tokens || (call_.causal && last > first_)) {
      shape_scores(first);
    }
    find_largest();
    weigh();
    add_values(values);
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
        if constexpr (!kKeepsQueries) load_queries(m, step, loaded[m]);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t words[4];
        load_matrices<false>(words, further<Shape>(begin, n * 8, step));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int kept = m * Shape::kSteps + step;
          const uint32_t (&q)[4] = kKeepsQueries ? kept_[kept % kKept] : loaded[m];
          multiply_matrices<T>(scores_[m][n], q, {words[0], words[1]});
          multiply_matrices<T>(scores_[m][n + 1], q, {words[2], words[3]});
        }
      }
    }
  }

  __device__ void shape_scores(int first) {
    const float factor = has_masks() ? call_.scale : 1.0f;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_ + m * 16 + i / 2 * 8 + threadIdx.x % 32 / 4;
          const int key = first + n * 8 + threadIdx.x % 4 * 2 + i % 2;
          float& score = scores_[m][n][i];
          score = score_of<Shape::kMasks>(call_, batch_, head_, row, key, score, factor);
        }
      }
    }
  }

  // Calls body(score) for the scores of row i of a lane.
  template <class Body>
  __device__ void for_each_score(int i, const Body& body) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k) body(scores_[i / 2][n][i % 2 * 2 + k]);
    }
  }

  __device__ void find_largest() {
    float largest[kRows];
    bool is_same = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = largest_[i];
      for_each_score(i, [&](float& score) { largest[i] = ::fmaxf(largest[i], score); });
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      largest[i] = ::fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], 1));
      largest[i] = ::fmaxf(largest[i], __shfl_xor_sync(0xffffffff, largest[i], 2));
      is_same = is_same && largest[i] == largest_[i];
    }
    if (!__all_sync(0xffffffff, is_same)) grow(largest);
  }

  // Scales what there is to the largest scores that there are now.
  __device__ void grow(const float (&largest)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float rescale = fast_exp2((largest_[i] - zero_if_none(largest[i])) * factor_);
      largest_[i] = largest[i];
      sum_[i] *= rescale;
#pragma unroll
      for (auto& each : out_[i / 2]) {
        each[i % 2 * 2] *= rescale;
        each[i % 2 * 2 + 1] *= rescale;
      }
    }
  }

  // From scores to weights.
  __device__ void weigh() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float shift = -zero_if_none(largest_[i]) * factor_;
      float sum = 0;
      for_each_score(i, [&](float& score) {
        score = fast_exp2(__fmaf_rn(score, factor_, shift));
        sum += score;
      });
      sum_[i] += sum;
    }
  }

  __device__ void add_values(unsigned values) {
    const unsigned begin = begin_of_rows<Shape>(values);
#pragma unroll
    for (int step = 0; step < Shape::kAtOnce; ++step) {
      uint32_t weights[kRowTiles][4];  // of 16 keys, as the first factor of a product
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&scores)[4] = scores_[m][2 * step + i / 2];
          weights[m][i] = rounded_pair<T>(scores[i % 2 * 2], scores[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < Shape::kSteps; ++n) {
        uint32_t words[4];
        load_matrices<true>(words, further<Shape>(begin, step * 16, n));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          multiply_matrices<T>(out_[m][2 * n], weights[m], {words[0], words[1]});
          multiply_matrices<T>(out_[m][2 * n + 1], weights[m], {words[2], words[3]});
        }
      }
    }
  }

  const BlockSparse& call_;
  int batch_, head_, first_, bit_;
  unsigned queries_;  // in shared memory
  float factor_;      // of scores, as powers of 2
  float largest_[kRows], sum_[kRows];
  uint32_t kept_[kKept][4];
  float scores_[kRowTiles][kKeyTiles][4];
  float out_[kRowTiles][kWidth / 8][4];
};

// Goes through the tiles of a list, of two arrays each: the next one is fetched while one is worked
// on. There is memory for two tiles from `near` on, and lanes may be under way. Calls
// fetch(pieces, near) to begin to fetch one, and body(pieces, near, tile).
template <class Shape, class Fetch, class Body>
__device__ inline void for_each_tile(const TileList& list, int block, unsigned near, int bytes,
                                     const Fetch& fetch, const Body& body) {
  const int tiles = tiles_of<Shape>(list, block);
  Pieces here = pieces_of<Shape>(list, block, 0), next = pieces_of<Shape>(list, block, 1);
  __syncthreads();  // a list before this one may still be worked on
  if (tiles > 0) fetch(here, near);
  end_fetches();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const Pieces coming = pieces_of<Shape>(list, block, tile + 2);
    wait_for_fetches<0>();
    __syncthreads();  // and all are done with the tile before, whose place is free
    if (tile + 1 < tiles) fetch(next, near + (tile + 1) % 2 * bytes);
    end_fetches();
    body(here, near + tile % 2 * bytes, tile);
    here = next;
    next = coming;
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads)
    attend_kernel(const __grid_constant__ SparseTask task) {
  extern __shared__ __align__(1024) char shared_bytes[];
  using T = typename Shape::T;
  const BlockSparse& call = task.call;
  const int tokens = int(call.tokens), width = int(call.width);
  const unsigned near = unsigned(__cvta_generic_to_shared(shared_bytes));
  const LaneTile lanes(task, int(call.heads));
  const int kv_head = lanes.head / int(call.group());
  fetch_lanes<Shape>(call.q, lanes.batch, lanes.head, lanes.first, task.tile, tokens, width, near);
  AttendingRows<Shape> rows(task, lanes, near);
  const char* const heads[] = {head_of<T>(call.k, lanes.batch, kv_head),
                               head_of<T>(call.v, lanes.batch, kv_head)};
  const int64_t of_token[] = {call.k.of_token, call.v.of_token};
  for_each_tile<Shape>(task.lists.of(lanes.head, lanes.tile), call.block,
                       near + task.tile * Shape::kRowBytes, 2 * Shape::kTileBytes,
                       [&](const Pieces& pieces, unsigned to) {
    fetch_pieces<Shape>(heads, of_token, pieces, tokens, width, to);
  }, [&](const Pieces& pieces, unsigned at, int tile) {
    if (tile == 0) rows.keep_queries();
    rows.take(pieces, at, at + Shape::kTileBytes);
  });
  wait_for_fetches<0>();
  rows.store(task);
}

}  // namespace dsx::cuda
