// What blocks of prefill_attention have in shared memory on CUDA where warp groups multiply, and
// how their warps wait for each other. A block has a group of warps that fetches, one that widens
// what comes as codes, and groups that multiply, each of 64 rows, which all take the same tiles of
// keys and values.
#pragma once

#include "common/cuda/mma_tiles.cuh"
#include "common/cuda/warpgroup_mma.cuh"
#include "attention/decode/decode_tiles_cuda.cuh"
#include "attention/prefill/prefill_tiles_cuda.cuh"
#include "attention/prefill/prefill_tasks_cuda.cuh"

namespace dsx::cuda {

// For heads of up to kWidth elements. All tiles are cut into panels, 128 bytes of each row, which
// lie as common/cuda/tma_tiles.cuh says. With kTakesTurns groups begin their products one after the
// other, so that some multiply while others weigh.
template <class Query, class Stored, int kHeadWidth, int kRowGroups, int kTileKeys, int kTileStages,
          bool kInTurns>
struct WarpgroupShape {
  using T = Query;
  using Kind = Stored;
  static constexpr bool kCodes = sizeof(Stored) == 1, kTakesTurns = kInTurns;
  using Value = std::conditional_t<kCodes, BFloat16, T>;
  static constexpr int kWidth = kHeadWidth, kKeys = kTileKeys, kStages = kTileStages;
  static constexpr int kGroups = kRowGroups, kGroupThreads = 32 * kGroupWarps;
  static constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kOthers = kCodes ? 2 : 1;  // groups that do not multiply come first
  static constexpr int kThreads = (kGroups + kOthers) * kGroupThreads;
  static constexpr int kRowThreads = kGroups * kGroupThreads;
  static constexpr int kPages = kKeys / kPageTokens;
  static constexpr int kPanelElements = 64, kPanels = kWidth / kPanelElements;
  static constexpr int kPanelBytes = kKeys * kLineBytes;  // of keys or values
  static constexpr int kPagePanelBytes = kPageTokens * kLineBytes;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kQueryPanelBytes = kGroupRows * kLineBytes;
  static constexpr int kGroupQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kQueryBytes = kGroups * kGroupQueryBytes;
  // As codes come, in rows as long as the head; and their scales, of a tile. Of these, four lanes
  // that have keys 8 n + 2 lane and the next one, of each 8, find theirs one after the other.
  static constexpr int kCodeBytes = kCodes ? kKeys * kWidth : 0;
  static constexpr int kScalesOfLane = kKeys / 4, kLaneScales = kScalesOfLane + 4;  // other banks
  static constexpr int kScales = kCodes ? 4 * kLaneScales : 0;
  // Registers of a thread: those that multiply take what the others give.
  static constexpr bool kIsWide = kGroups == 2 && !kCodes;
  static constexpr int kFetchRegisters = kIsWide ? 40 : 32;
  static constexpr int kWidenRegisters = 48;
  static constexpr int kRowRegisters = kIsWide ? 232 : kCodes ? 216 : 160;
  static_assert(kKeys % kPageTokens == 0 && (kGroups == 2 || (kGroups == 3 && !kCodes)));

  __device__ static int place_of_scale(int key) {
    return key % 8 / 2 * kLaneScales + key / 8 * 2 + key % 2;
  }
  // Where 16 bytes of a row of a tile of keys or values begin.
  __device__ static int place_of(int key, int chunk) {
    return chunk / kUnitsOfLine * kPanelBytes + place_in_tma_tile(key, chunk % kUnitsOfLine);
  }
};

// Tiles, or codes of tiles: of keys, and of values. Each is full, then empty.
template <int kStages>
struct TileBarriers {
  Barrier full[2][kStages], empty[2][kStages];

  __device__ void begin(int writers, int readers) {
    for (int which = 0; which < 2; ++which) {
      for (Barrier& each : full[which]) begin_barrier(&each, writers);
      for (Barrier& each : empty[which]) begin_barrier(&each, readers);
    }
  }
};

// What a block has in shared memory behind queries, tiles, and codes.
template <class Shape>
struct WarpgroupPipeline {
  static constexpr int kStages = Shape::kStages, kValueStages = kStages + 1;
  // Of the group that fetches, the first warp has tiles, these have queries.
  static constexpr int kQueryWarps = kGroupWarps - 1;

  // Scales of keys are there with their tile, and are released with it. Those of values come as
  // early, as the weights are made before the values are there; but are read after the keys are
  // released, which is when the next keys may take their place. So they have one stage more, and
  // barriers of their own.
  float key_scales[kStages][Shape::kScales], value_scales[kValueStages][Shape::kScales];
  TileBarriers<kStages> tiles, codes;
  Barrier value_scales_read[Shape::kCodes ? kValueStages : 0];
  Barrier queries_full, queries_empty;
  int lacks_pages[kQueryWarps];  // of the slot whose queries are there, one of them: it does

  // Of keys (0) or values (1), as they are multiplied.
  __device__ static char* tile(char* memory, int which, int stage) {
    return memory + Shape::kQueryBytes + (which * kStages + stage) * Shape::kTileBytes;
  }
  // As they come.
  __device__ static char* coming(char* memory, int which, int stage) {
    if constexpr (!Shape::kCodes) return tile(memory, which, stage);
    return tile(memory, 2, 0) + (which * kStages + stage) * Shape::kCodeBytes;
  }
  __device__ TileBarriers<kStages>& coming() { return Shape::kCodes ? codes : tiles; }

  static constexpr int kBytesBefore =
      Shape::kQueryBytes + 2 * kStages * (Shape::kTileBytes + Shape::kCodeBytes);

  // One thread calls it, before any other goes on.
  __device__ void begin() {
    constexpr int kReaders = Shape::kGroups * kGroupWarps;
    tiles.begin(Shape::kCodes ? kGroupWarps : 1, kReaders);
    if constexpr (Shape::kCodes) {
      codes.begin(1, kGroupWarps);
      for (Barrier& each : value_scales_read) begin_barrier(&each, kReaders);
    }
    begin_barrier(&queries_full, kQueryWarps * 32);
    begin_barrier(&queries_empty, kReaders);
    show_barriers();
  }
};

template <class Shape>
constexpr int warpgroup_shared_bytes() {
  return WarpgroupPipeline<Shape>::kBytesBefore + int(sizeof(WarpgroupPipeline<Shape>));
}

// Where a warp is in the pipeline: at a stage, for an even time (phase 0) or an odd one.
template <int kStages>
struct StageAndPhase {
  int stage = 0, phase = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// The barriers that have a number, of some warps of a block; 0 is that of all threads.
template <class Shape>
struct NumberedBarriers {
  static constexpr int kRows = 1;  // of all that multiply
  static constexpr int kTurns = 2, kOfGroup = kTurns + Shape::kGroups;

  __device__ static void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
  }
  // Comes by, and waits for nobody.
  __device__ static void pass(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
  }
  // Whether it is so for any of the threads.
  __device__ static bool meet_with_any(int number, int threads, bool is_so) {
    int result;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; bar.red.or.pred q, %1, %2, p;"
        " selp.u32 %0, 1, 0, q; }"
        : "=r"(result)
        : "r"(number), "r"(threads), "r"(int(is_so))
        : "memory");
    return result != 0;
  }
};

// The strips of rows that a block has one after the other. Those that see most come first, and
// blocks get theirs there and back, so that all have about as much to do.
class StripsOfBlock {
 public:
  __device__ StripsOfBlock(const PrefillAttention& call, int rows_of_strip)
      : beside_(unsigned(call.kv.heads * call.news.batches)),
        strips_((unsigned(call.rows()) + rows_of_strip - 1) / rows_of_strip) {}

  // Whether there is another one; then number() is its place in the order of StripOfRows.
  __device__ bool next() {
    const unsigned place = turn_ % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const unsigned task = turn_ * gridDim.x + place;
    ++turn_;
    number_ = task % beside_ * strips_ + task / beside_;
    return task < beside_ * strips_;  // what a turn lacks, all later ones do
  }
  __device__ unsigned number() const { return number_; }

 private:
  const unsigned beside_, strips_;
  unsigned turn_ = 0, number_ = 0;
};

// The tiles of keys that rows of a strip see: [begin, end), counted from the start of the sequence.
// Of those in [whole_begin, whole_end) all rows see all.
template <class Shape>
struct SeenTiles {
  int begin, end, whole_begin, whole_end;

  __device__ SeenTiles(const PrefillAttention& call, const StripOfRows& strip) {
    const int rows = ::min(strip.rows() - strip.first_row, Shape::kRows);
    const int first = strip.position_of(strip.first_row);
    const int last = strip.position_of(strip.first_row + rows - 1);
    begin = int(seen_at(first, call.window).begin) / Shape::kKeys;
    end = last / Shape::kKeys + 1;
    whole_begin = ceil_div(int(seen_at(last, call.window).begin), Shape::kKeys);
    whole_end = (first + 1) / Shape::kKeys;
  }
  __device__ bool are_whole(int number) const {
    return number >= whole_begin && number < whole_end;
  }
  // Calls keys(number) and values(number) for all tiles, in the order in which they are multiplied:
  // values come after the keys of the next tile.
  template <class Keys, class Values>
  __device__ void for_each(const Keys& keys, const Values& values) const {
    for (int number = begin; number <= end; ++number) {
      if (number < end) keys(number);
      if (number > begin) values(number - 1);
    }
  }
};

}  // namespace dsx::cuda
