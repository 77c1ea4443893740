// Keys and values on their way to the tensor cores: a warp of each block reads pages into the
// stages of a pipeline in shared memory, for the others, which multiply what has arrived.
//
// Of a stage each of these warps has a TMA tile: 64 or 128 bytes of each of some tokens of its
// page. In the tile's matrices of 8 rows, these are tokens one after the other.
#pragma once

#include "common/cuda/chain.cuh"
#include "common/cuda/fetch.cuh"
#include "attention/decode/decode_tiles_cuda.cuh"
#include "attention/decode/decode_tasks_cuda.cuh"
#include "common/cuda/mma.cuh"

namespace dsx::cuda {

// Pages are read two stages at a time.
constexpr int kStageTokens = 32, kMostStages = 12, kTogether = 2;
constexpr int kGroup = 8;                // lanes of the reading warp that have a page
constexpr int kPageWarps = kChunkPages;  // each has one of the pages of a chunk
constexpr int kReadingWarp = kPageWarps, kPipelineThreads = 32 * (kPageWarps + 1);

// What a warp has of a stage, of rows of kWidth elements; those of fewer are as if followed by
// zeros.
template <class Kind, int kWidth>
struct StageLayout {
  static constexpr int kBytes = Kind::kQuantized ? 1 : 2;
  static constexpr int kRow = kWidth * kBytes < 128 ? 64 : 128;  // bytes, of a tile
  static constexpr int kElements = kRow / kBytes;
  static constexpr int kColumnTiles = kWidth / kElements;  // of a token
  static constexpr int kTokenTiles = kPageTokens / kStageTokens;
  static constexpr int kOfPage = kColumnTiles * kTokenTiles;
  static constexpr int kSize = kStageTokens * kRow;
  static constexpr int kScales = Kind::kQuantized ? kPageTokens : 0;  // behind all stages

  // Of stage number k of a page. All of some tokens comes before the next ones, as it lies in
  // memory: what is read of a place at the same time is read faster.
  __device__ static constexpr int column_tile(int k) { return k % kColumnTiles; }
  __device__ static constexpr int token_tile(int k) { return k / kColumnTiles; }
  // Where it begins in the page.
  __device__ static constexpr int element(int k) { return column_tile(k) * kElements; }
  __device__ static constexpr int token(int k) { return token_tile(k) * kStageTokens; }
};

struct TmaTiles {
  CUtensorMap keys, values;
  int stages;
  bool there;  // else rows are fetched by every lane
};

// What the warps of a block tell one another.
struct Pipeline {
  static constexpr int kTasks = 16;  // that the reading warp can be ahead, and more

  Barrier full[kMostStages][kPageWarps], empty[kMostStages];
  Barrier begun[kPageWarps];       // there is a first task
  Task tasks[kPageWarps][kTasks];  // one for each warp, written by a lane that tells it more
  bool wrong[kTasks][kPageWarps];  // there is no such page

  __device__ Task& task(int warp, int i) { return tasks[warp][i % kTasks]; }
};

// Where a warp is in the pipeline: at a stage, for an even time (phase 0) or an odd one.
struct PipelineState {
  int stages, stage = 0;
  int phase = 0;

  __device__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
};

// How many times the rows of a task take the keys, 8 at a time.
constexpr int kTileRows = 8;
__device__ inline int row_tiles_of(const DecodeAttention& call, const Task& task) {
  return (task.count * int(call.group) + kTileRows - 1) / kTileRows;
}

// The warp that reads. Groups of 8 lanes have a page each. With kByEngine there are tiles for sure.
template <class Kind, int kWidth, bool kByEngine>
class Reader {
  using Layout = cuda::StageLayout<Kind, kWidth>;

 public:
  __device__ Reader(const DecodeAttention& call, const TmaTiles& tiles, Pipeline& pipeline,
                    char* memory)
      : call_(call), tiles_(tiles), pipeline_(pipeline), memory_(memory), state_{tiles.stages} {
    scales_ = reinterpret_cast<float*>(memory + tiles.stages * kPageWarps * Layout::kSize);
  }

  // One thread calls it, before any other goes on.
  __device__ static void begin(const TmaTiles& tiles, Pipeline& pipeline) {
    for (int i = 0; i < tiles.stages; ++i) {
      for (Barrier& full : pipeline.full[i]) begin_barrier(&full, are_there(tiles) ? 1 : kGroup);
      begin_barrier(&pipeline.empty[i], kPageWarps);
    }
    for (Barrier& begun : pipeline.begun) begin_barrier(&begun, 1);
    show_barriers();
  }

  // Finds the first task, and has its pages brought into the L2 cache; then makes sure of it. The
  // next kernel begins once all blocks have.
  template <class Tasks, class... Share>
  __device__ Tasks find_first(const Share&... share) {
    Tasks tasks(call_, share...);
    find_first(tasks);
    if (are_there(tiles_)) ask_for_first();
    wait_for_previous();
    let_next_begin();
    const int page = page_of(task_ahead_);  // at the same time as the rest, not after it
    if (tasks.are_still_so()) {
      page_ahead_ = page;
    } else {
      tasks = Tasks(call_, share...);
      find_first(tasks);
    }
    return tasks;
  }
  // The others may then begin to wait for what there is of it.
  __device__ void show_first() {
    if (lane_ % kGroup == 0) {
      pipeline_.task(warp_, 0) = task_ahead_;
      arrive(&pipeline_.begun[warp_]);
    }
  }
  // What the table says of the page number `number` of the first task's slot.
  __device__ int page_beside_first(int number) const {
    const int here = number - task_ahead_.chunk * kChunkPages;
    if (task_ahead_.there && here >= 0 && here < kChunkPages) {
      return __shfl_sync(0xffffffff, page_ahead_, here * kGroup);
    }
    return __ldcg(call_.kv.table + task_ahead_.slot * call_.kv.pages_of_slot + number);
  }

  template <class Tasks>
  __device__ void run(Tasks& tasks) {
    policy_ = read_once();
    for (int i = 0; task_ahead_.there; ++i) {
      const Task task = task_ahead_;
      const int page = page_ahead_;
      task_ahead_ = tasks.next();
      page_ahead_ = page_of(task_ahead_);
      const Span span = span_of(task, page);
      if (lane_ % kGroup == 0) {
        pipeline_.task(warp_, i + 1) = task_ahead_;
        pipeline_.wrong[i % Pipeline::kTasks][warp_] = span.wrong;
      }
      __syncwarp();
      const int row_tiles = row_tiles_of(call_, task);
      for (int row_tile = 0; row_tile < row_tiles; ++row_tile) {
#pragma unroll 1  // instructions are read from memory, too
        for (int which = 0; which < 2; ++which) fill(which == 0, task.head, page, span);
      }
    }
  }

 private:
  template <class Tasks>
  __device__ void find_first(Tasks& tasks) {
    task_ahead_ = tasks.next();
    page_ahead_ = page_of(task_ahead_);
  }
  __device__ void ask_for_first() const {
    if (lane_ % kGroup != 0 || !span_of(task_ahead_, page_ahead_).there) return;
#pragma unroll
    for (int k = 0; k < Layout::kOfPage; ++k) {
      const TileOrigin origin = {Layout::element(k), Layout::token(k), task_ahead_.head,
                                 page_ahead_};
      prefetch_page_tile(tiles_.keys, origin);
      prefetch_page_tile(tiles_.values, origin);
    }
  }

  __device__ static bool are_there(const TmaTiles& tiles) {
#if __CUDA_ARCH__ >= 900
    return kByEngine || tiles.there;
#else
    return false;
#endif
  }

  // The tokens [begin, end) of a page that are to be read.
  struct Span {
    int begin, end;
    bool there, wrong;
  };

  __device__ int number_of(const Task& task) const { return task.chunk * kChunkPages + warp_; }
  __device__ bool looks_at(const Task& task) const {
    const int begin = number_of(task) * kPageTokens;
    return task.there && begin < task.length && begin + kPageTokens > task.seen_begin;
  }
  __device__ int page_of(const Task& task) const {
    if (!looks_at(task)) return 0;
    return __ldcg(call_.kv.table + task.slot * call_.kv.pages_of_slot + number_of(task));
  }
  __device__ Span span_of(const Task& task, int page) const {
    Span span;
    const bool used = looks_at(task);
    span.there = used && page >= 0 && page < call_.kv.pages;
    span.wrong = used && !span.there;
    const int begin = number_of(task) * kPageTokens;
    span.begin = task.seen_begin - begin;
    span.end = task.length - begin;
    return span;
  }

  // Fills stages with the keys or values of a page, as they become free.
  __device__ void fill(bool keys, int head, int page, const Span& span) {
#pragma unroll 1
    for (int k = 0; k < Layout::kOfPage; ++k) {
      if (k % kTogether == 0) {
        PipelineState ahead = state_;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          wait_together_for(&pipeline_.empty[ahead.stage], ahead.phase ^ 1);
          ahead.advance();
        }
      }
      const int token = Layout::token(k), number = state_.stage * kPageWarps + warp_;
      const bool there = span.there && token < span.end && token + kStageTokens > span.begin;
      const bool with_scales = Kind::kQuantized && k == 0 && span.there;
      Barrier* const full = &pipeline_.full[state_.stage][warp_];
      char* const tile = memory_ + number * Layout::kSize;
      if (!are_there(tiles_)) {
        if (there) fetch_rows(keys, call_.kv.place(page, head, token), k, span, tile);
      } else if (lane_ % kGroup == 0) {
        const int bytes = (there ? Layout::kSize : 0) + (with_scales ? kPageTokens * 4 : 0);
        arrive_expecting(full, bytes);
        const TileOrigin origin = {Layout::element(k), token, head, page};
        if (there) fetch_page_tile(tile, keys ? tiles_.keys : tiles_.values, origin, full, policy_);
      }
      if constexpr (Kind::kQuantized) {
        const float* const scales = keys ? call_.kv.key_scales : call_.kv.value_scales;
        if (with_scales) {
          fetch_scales(scales + call_.kv.scale_place(page, head, 0), number * Layout::kScales,
                       full);
        }
      }
      if (!are_there(tiles_)) arrive_after_fetches(full);
      state_.advance();
    }
  }

  __device__ void fetch_scales(const float* scales, int place, Barrier* full) {
    if (!are_there(tiles_)) {
      for (int i = lane_ % kGroup; i < kPageTokens / 4; i += kGroup) {
        fetch_bytes<16>(scales_ + place + i * 4, scales + i * 4);
      }
    } else if (lane_ % kGroup == 0) {
      fetch_in_bulk(scales_ + place, scales, kPageTokens * 4, full);
    }
  }

  __device__ void fetch_rows(bool keys, int64_t place, int k, const Span& span, char* tile) {
    constexpr int kPieces = Layout::kRow / 16;
    const int first = Layout::token(k), begin = Layout::element(k) * Layout::kBytes;
    const char* const rows = static_cast<const char*>(keys ? call_.kv.keys : call_.kv.values);
    const int64_t of_token = call_.kv.of_token * Layout::kBytes;
    const int bytes = int(call_.kv.width) * Layout::kBytes;
    for (int i = lane_ % kGroup; i < kStageTokens * kPieces; i += kGroup) {
      const int token = i / kPieces, piece = i % kPieces, byte = begin + piece * 16;
      if (first + token < span.begin || first + token >= span.end) continue;
      const char* const row = rows + place * Layout::kBytes + token * of_token;
      const bool inside = byte < bytes;
      fetch_part(tile + swizzled<Layout::kRow>(token, piece) * 16, inside ? row + byte : row,
                 inside ? 16 : 0);
    }
  }

  const DecodeAttention& call_;
  const TmaTiles& tiles_;
  Pipeline& pipeline_;
  char* const memory_;
  float* scales_;
  PipelineState state_;
  uint64_t policy_;
  Task task_ahead_;
  int page_ahead_;
  const int lane_ = threadIdx.x % 32, warp_ = lane_ / kGroup;
};

}  // namespace dsx::cuda
