// What 8 rows of a head find in a page, by tensor cores: they are the columns of what is
// multiplied, K q and V^T p.
//
// Producer and consumers, where the keys of a page take two stages, K0 and K1, and its values V0
// and V1; there are four stages, and K0' and so on are of the next task:
//
//   time -->
//   stage 0  <~~~~~~|K0>    <~~~~~~~~~~~~~~|   K0'>      <~~~~~~~~~~~~~
//   stage 1  <~~~~~~|   K1> <~~~~~~~~~~~~~~|        K1'> <~~~~~~~~~~~~~
//   stage 2  <~~~~~~~~|          V0>    <~~~~~~~~~~~~~|        V0'>
//   stage 3  <~~~~~~~~|             V1> <~~~~~~~~~~~~~|             V1'>
//   a warp           K0 K1 weigh V0 V1  store  K0'  K1' weigh' V0'  V1'  store'
//
//   <  All four warps have released this stage and the next one: both are `empty`, and the Reader,
//      which has waited for that, begins to fill them.
//   ~  Bytes are on their way: to each warp its own tile.
//   |  The tile of this warp has arrived: `full` lets its wait() return.
//   >  The warp has multiplied what is there, and calls release().
//
// So a warp waits only for bytes, and the Reader only for stages: it is ahead of the warps by as
// many as there are. They wait for each other nowhere but around the store, where what they have
// found is put together.
#pragma once

#include "attention/decode/decode_non_finite_cuda.cuh"
#include "attention/decode/decode_scores_cuda.cuh"
#include "attention/decode/decode_stages_cuda.cuh"
#include "attention/decode/decode_value_sums_cuda.cuh"

namespace dsx::cuda {

// A barrier of the warps that multiply.
__device__ inline void page_warps_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(32 * kPageWarps) : "memory");
}

// A warp's work on its page of each task: the loop over stages, between Stages, where they come
// from, and Scores, NonFinite and ValueSums, which are given all that they read. With kFresh all
// tasks of the block are of the same rows, those of one new token, which is taken from where the
// block has made it.
template <class Q, class Kind, int kWidth, bool kFresh>
class PageAttention {
  using Layout = cuda::StageLayout<Kind, kWidth>;
  using Stage = typename Stages<Kind, kWidth>::Arrived;
  using Found = cuda::Found<kWidth>;
  using NonFinite = cuda::NonFinite<Q, Kind, kWidth>;
  using Scores = cuda::Scores<Q, Kind, kWidth>;
  using ValueSums = cuda::ValueSums<Q, Kind, kWidth>;
  using NewToken = cuda::NewToken<kWidth>;

 public:
  __device__ PageAttention(const DecodeAttention& call, Pipeline& pipeline, char* memory,
                           int stages, Found& found, const NewToken* fresh)
      : call_(call),
        pipeline_(pipeline),
        found_(found),
        fresh_(fresh),
        stages_(pipeline, memory, stages, warp_) {}

  __device__ void read_first() {
    const Task& task = pipeline_.task(warp_, 0);
    if constexpr (kFresh) {
      queries_.read_near(fresh_->queries[0], NewToken::kStride, int(call_.group));
    } else if (task.there) {
      queries_.read(call_, task, 0);
    }
    is_new_ = true;
  }

  // Leaves in found_ what row tile number `row_tile` of task number i find.
  __device__ void run(int i, int row_tile, int row_tiles) {
    const Task& task = pipeline_.task(warp_, i);
    if (is_new_) prepare(task, row_tile);
    const int begin = (task.chunk * kChunkPages + warp_) * kPageTokens;
    const bool used = begin < task.length && begin + kPageTokens > task.seen_begin;
    page_ = PageTokens(task, begin, kFresh);
    Powers powers[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    sums_.clear();
    if (used) {
      multiply_keys();
    } else {
      skip();
    }
    is_new_ = read_next(i, row_tile, row_tiles);
    const bool wrong = pipeline_.wrong[i % Pipeline::kTasks][warp_];
    if (used) {
      scores_.weigh(call_, lane_, page_, scoring_, powers);
      add_values(task.count);
    } else {
      skip();
    }
    if (wrong) powers[0] = powers[1] = {-INFINITY, NAN};
    const int rows = task.count * int(call_.group) - row_tile * kTileRows;
    page_warps_barrier();  // the others have read what was there
    sums_.store(lane_, warp_, rows, powers, found_);
    page_warps_barrier();
  }

 private:
  __device__ void prepare(const Task& task, int row_tile) {
    queries_.prepare();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = row_tile * kTileRows + lane_.number % 4 * 2 + i;
      const int token = int(quotient(number, call_.group));
      const int head = task.head * int(call_.group) + number - token * int(call_.group);
      scoring_[i] = {};
      if (token < task.count) scoring_[i].read(call_, head, task.position(token));
    }
  }
  // Begins to read the rows that come next, if they are others.
  __device__ bool read_next(int i, int row_tile, int row_tiles) {
    if constexpr (kFresh) return false;
    const bool more = row_tile + 1 < row_tiles;
    const Task &task = pipeline_.task(warp_, i), &next = more ? task : pipeline_.task(warp_, i + 1);
    if (!next.there || (row_tiles == 1 && task.goes_on_in(next))) return false;
    queries_.read(call_, next, more ? row_tile + 1 : 0);
    return true;
  }

  __device__ void skip() {
#pragma unroll 1
    for (int k = 0; k < Layout::kOfPage; ++k) stages_.release(stages_.wait());
  }

  // Scales of this lane's tokens; `fresh` is that of the new one.
  __device__ void read_scales(const float* fresh, float (&scales)[Scores::kTokens]) const {
    const float* const all = stages_.wait_for_scales();
#pragma unroll
    for (int k = 0; k < Scores::kTokens; ++k) {
      const int token = k * 8 + lane_.number / 4;
      scales[k] = token == page_.fresh ? *fresh : all[token];
    }
  }
  // Puts the new token where stage number k of the page has come with what was there before.
  __device__ void put_fresh(const Stage& stage, int k, const char* row) const {
    const int token = page_.fresh - Layout::token(k);
    if (page_.fresh < 0 || token < 0 || token >= kStageTokens) return;
    if (lane_.number < Layout::kRow / 16) {
      const uint4* const from =
          reinterpret_cast<const uint4*>(row + Layout::element(k) * Layout::kBytes);
      char* const to = stage.tile() + swizzled<Layout::kRow>(token, lane_.number) * 16;
      *reinterpret_cast<uint4*>(to) = from[lane_.number];
      wrote_before_fetch();
    }
    __syncwarp();
  }

  // Takes the stages of keys, or of values, and calls do_it(k, stage) for each that some row sees.
  template <class Do>
  __device__ void for_each_seen(const Do& do_it) {
#pragma unroll
    for (int k = 0; k < Layout::kOfPage; ++k) {
      Stage stage = stages_.wait();
      if (page_.is_unseen(Layout::token(k))) {
        stages_.release(std::move(stage));
        continue;  // not an else: one release for both takes more registers
      }
      do_it(k, stage);
      stages_.release(std::move(stage));
    }
  }

  __device__ void multiply_keys() {
    float scales[Scores::kTokens];
    if constexpr (Kind::kQuantized) read_scales(kFresh ? &fresh_->key_scale : nullptr, scales);
    scores_.clear();
    for_each_seen([&](int k, const Stage& stage) {
      if constexpr (kFresh) put_fresh(stage, k, fresh_->keys);
      scores_.add(lane_, stage.tile(), k, queries_);
    });
    if constexpr (Kind::kQuantized) scores_.scale(scales, queries_);
  }

  __device__ void add_values(int tokens) {
    float inverse[2];
    if constexpr (Kind::kQuantized) {
      float scales[Scores::kTokens];
      read_scales(kFresh ? &fresh_->value_scale : nullptr, scales);
      scores_.scale_to_fit(lane_, page_, scoring_, scales, inverse);
    }
    for_each_seen([&](int k, const Stage& stage) {
      if constexpr (kFresh) put_fresh(stage, k, fresh_->values);
      if (page_.is_edge && !std::is_same_v<Kind, Int8Kv>) {
        const int first = Layout::token(k);
        if (kFresh || tokens == 1) {
          NonFinite::blank(lane_, stage.tile(), page_, first);
        } else {
          const auto weight = [&](int token, int i) { return scores_.at(first / 8 + token, i); };
          NonFinite::mask(lane_, stage.tile(), page_, first, call_, scoring_, weight,
                          sums_.of_stage(k));
        }
      }
      sums_.add(lane_, stage.tile(), k, scores_);
    });
    if constexpr (Kind::kQuantized) sums_.scale(inverse);
  }

  const DecodeAttention& call_;
  Pipeline& pipeline_;
  Found& found_;
  const NewToken* const fresh_;
  const PageLane<Kind, kWidth> lane_;
  const int warp_ = threadIdx.x / 32;
  Stages<Kind, kWidth> stages_;
  PageTokens page_;
  bool is_new_;
  Queries<Q, Kind, kWidth> queries_;
  Scoring scoring_[2];
  Scores scores_;
  ValueSums sums_;
};

}  // namespace dsx::cuda
