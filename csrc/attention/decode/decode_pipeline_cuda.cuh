// Keys and values on their way to the tensor cores: a warp of each block reads pages into a ring of
// slots in shared memory, for the others, which multiply what has arrived.
//
// A slot has a box: 64 or 128 bytes of each of some tokens of a page. In its matrices of 8 rows,
// these are tokens one after the other.
#pragma once

#include "common/cuda/chain.cuh"
#include "common/cuda/fetch.cuh"
#include "attention/decode/decode_tiles_cuda.cuh"
#include "attention/decode/decode_tasks_cuda.cuh"
#include "common/cuda/mma.cuh"

namespace dsx::cuda {

// Pages are read two slots at a time.
constexpr int kSlotTokens = 32, kMostSlots = 12, kTogether = 2;
constexpr int kGroup = 8;                // lanes of the reading warp that have a page
constexpr int kPageWarps = kChunkPages;  // each has one of the pages of a chunk
constexpr int kReadingWarp = kPageWarps, kRingThreads = 32 * (kPageWarps + 1);

// Rows of kWidth elements; those of fewer are as if followed by zeros.
template <class Kind, int kWidth>
struct Slot {
  static constexpr int kBytes = Kind::kQuantized ? 1 : 2;
  static constexpr int kRow = kWidth * kBytes < 128 ? 64 : 128;  // bytes, of a box
  static constexpr int kElements = kRow / kBytes;
  static constexpr int kBoxes = kWidth / kElements;  // of a token
  static constexpr int kParts = kPageTokens / kSlotTokens;
  static constexpr int kOfPage = kBoxes * kParts;
  static constexpr int kSize = kSlotTokens * kRow;
  static constexpr int kScales = Kind::kQuantized ? kPageTokens : 0;  // behind all slots

  // Where slot number k of a page begins in it.
  __device__ static constexpr int element(int k) { return k / kParts * kElements; }
  __device__ static constexpr int token(int k) { return k % kParts * kSlotTokens; }
};

struct Boxes {
  CUtensorMap keys, values;
  int slots;
  bool there;  // else rows are fetched by every lane
};

// What the warps of a block tell one another.
struct Ring {
  static constexpr int kUnits = 16;  // that the reading warp can be ahead, and more

  Barrier full[kMostSlots][kPageWarps], empty[kMostSlots];
  Barrier begun[kPageWarps];       // there is a first unit
  Unit units[kPageWarps][kUnits];  // one for each warp, written by a lane that tells it more
  bool wrong[kUnits][kPageWarps];  // there is no such page

  __device__ Unit& unit(int warp, int i) { return units[warp][i % kUnits]; }
};

// Where a warp is in the ring.
struct Turn {
  int slots, slot = 0;
  int phase = 0;

  __device__ void go_on() {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};

// How many times the rows of a unit take the keys, 8 at a time.
constexpr int kUnitRows = 8;
__device__ inline int parts_of(const DecodeAttention& call, const Unit& unit) {
  return (unit.count * int(call.group) + kUnitRows - 1) / kUnitRows;
}

// The warp that reads. Groups of 8 lanes have a page each. With kByEngine there are boxes for sure.
template <class Kind, int kWidth, bool kByEngine>
class Reader {
  using Slot = cuda::Slot<Kind, kWidth>;

 public:
  __device__ Reader(const DecodeAttention& call, const Boxes& boxes, Ring& ring, char* slots)
      : call_(call), boxes_(boxes), ring_(ring), slots_(slots), turn_{boxes.slots} {
    scales_ = reinterpret_cast<float*>(slots + boxes.slots * kPageWarps * Slot::kSize);
  }

  // One thread calls it, before any other goes on.
  __device__ static void begin(const Boxes& boxes, Ring& ring) {
    for (int i = 0; i < boxes.slots; ++i) {
      for (Barrier& full : ring.full[i]) begin_barrier(&full, are_there(boxes) ? 1 : kGroup);
      begin_barrier(&ring.empty[i], kPageWarps);
    }
    for (Barrier& begun : ring.begun) begin_barrier(&begun, 1);
    show_barriers();
  }

  // Finds the first unit, and has its pages brought into the L2 cache; then makes sure of it. The
  // next kernel begins once all blocks have.
  template <class Units, class... Share>
  __device__ Units find_first(const Share&... share) {
    Units units(call_, share...);
    find_first(units);
    if (are_there(boxes_)) ask_for_first();
    wait_for_previous();
    let_next_begin();
    const int page = page_of(unit_ahead_);  // at the same time as the rest, not after it
    if (units.are_still_so()) {
      page_ahead_ = page;
    } else {
      units = Units(call_, share...);
      find_first(units);
    }
    return units;
  }
  // The others may then begin to wait for what there is of it.
  __device__ void show_first() {
    if (lane_ % kGroup == 0) {
      ring_.unit(warp_, 0) = unit_ahead_;
      arrive(&ring_.begun[warp_]);
    }
  }
  // What the table says of the page number `number` of the first unit's slot.
  __device__ int page_beside_first(int number) const {
    const int here = number - unit_ahead_.chunk * kChunkPages;
    if (unit_ahead_.there && here >= 0 && here < kChunkPages) {
      return __shfl_sync(0xffffffff, page_ahead_, here * kGroup);
    }
    return __ldcg(call_.kv.table + unit_ahead_.slot * call_.kv.pages_of_slot + number);
  }

  template <class Units>
  __device__ void run(Units& units) {
    policy_ = read_once();
    for (int i = 0; unit_ahead_.there; ++i) {
      const Unit unit = unit_ahead_;
      const int page = page_ahead_;
      unit_ahead_ = units.next();
      page_ahead_ = page_of(unit_ahead_);
      const Span span = span_of(unit, page);
      if (lane_ % kGroup == 0) {
        ring_.unit(warp_, i + 1) = unit_ahead_;
        ring_.wrong[i % Ring::kUnits][warp_] = span.wrong;
      }
      __syncwarp();
      const int parts = parts_of(call_, unit);
      for (int part = 0; part < parts; ++part) {
#pragma unroll 1  // instructions are read from memory, too
        for (int which = 0; which < 2; ++which) fill(which == 0, unit.head, page, span);
      }
    }
  }

 private:
  template <class Units>
  __device__ void find_first(Units& units) {
    unit_ahead_ = units.next();
    page_ahead_ = page_of(unit_ahead_);
  }
  __device__ void ask_for_first() const {
    if (lane_ % kGroup != 0 || !span_of(unit_ahead_, page_ahead_).there) return;
#pragma unroll
    for (int k = 0; k < Slot::kOfPage; ++k) {
      const BoxPlace place = {Slot::element(k), Slot::token(k), unit_ahead_.head, page_ahead_};
      ask_for_box(boxes_.keys, place);
      ask_for_box(boxes_.values, place);
    }
  }

  __device__ static bool are_there(const Boxes& boxes) {
#if __CUDA_ARCH__ >= 900
    return kByEngine || boxes.there;
#else
    return false;
#endif
  }

  // The tokens [begin, end) of a page that are to be read.
  struct Span {
    int begin, end;
    bool there, wrong;
  };

  __device__ int number_of(const Unit& unit) const { return unit.chunk * kChunkPages + warp_; }
  __device__ bool looks_at(const Unit& unit) const {
    const int begin = number_of(unit) * kPageTokens;
    return unit.there && begin < unit.length && begin + kPageTokens > unit.seen_begin;
  }
  __device__ int page_of(const Unit& unit) const {
    if (!looks_at(unit)) return 0;
    return __ldcg(call_.kv.table + unit.slot * call_.kv.pages_of_slot + number_of(unit));
  }
  __device__ Span span_of(const Unit& unit, int page) const {
    Span span;
    const bool used = looks_at(unit);
    span.there = used && page >= 0 && page < call_.kv.pages;
    span.wrong = used && !span.there;
    const int begin = number_of(unit) * kPageTokens;
    span.begin = unit.seen_begin - begin;
    span.end = unit.length - begin;
    return span;
  }

  // Fills slots with the keys or values of a page, as they become free.
  __device__ void fill(bool keys, int head, int page, const Span& span) {
#pragma unroll 1
    for (int k = 0; k < Slot::kOfPage; ++k) {
      if (k % kTogether == 0) {
        Turn turn = turn_;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          wait_together_for(&ring_.empty[turn.slot], turn.phase ^ 1);
          turn.go_on();
        }
      }
      const int token = Slot::token(k), number = turn_.slot * kPageWarps + warp_;
      const bool there = span.there && token < span.end && token + kSlotTokens > span.begin;
      const bool with_scales = Kind::kQuantized && k == 0 && span.there;
      Barrier* const full = &ring_.full[turn_.slot][warp_];
      char* const slot = slots_ + number * Slot::kSize;
      if (!are_there(boxes_)) {
        if (there) fetch_rows(keys, call_.kv.place(page, head, token), k, span, slot);
      } else if (lane_ % kGroup == 0) {
        const int bytes = (there ? Slot::kSize : 0) + (with_scales ? kPageTokens * 4 : 0);
        arrive_expecting(full, bytes);
        const BoxPlace place = {Slot::element(k), token, head, page};
        if (there) fetch_box(slot, keys ? boxes_.keys : boxes_.values, place, full, policy_);
      }
      if constexpr (Kind::kQuantized) {
        const float* const scales = keys ? call_.kv.key_scales : call_.kv.value_scales;
        if (with_scales) {
          fetch_scales(scales + call_.kv.scale_place(page, head, 0), number * Slot::kScales, full);
        }
      }
      if (!are_there(boxes_)) arrive_after_fetches(full);
      turn_.go_on();
    }
  }

  __device__ void fetch_scales(const float* scales, int place, Barrier* full) {
    if (!are_there(boxes_)) {
      for (int i = lane_ % kGroup; i < kPageTokens / 4; i += kGroup) {
        fetch_bytes<16>(scales_ + place + i * 4, scales + i * 4);
      }
    } else if (lane_ % kGroup == 0) {
      fetch_in_bulk(scales_ + place, scales, kPageTokens * 4, full);
    }
  }

  __device__ void fetch_rows(bool keys, int64_t place, int k, const Span& span, char* slot) {
    constexpr int kPieces = Slot::kRow / 16;
    const int first = Slot::token(k), begin = Slot::element(k) * Slot::kBytes;
    const char* const rows = static_cast<const char*>(keys ? call_.kv.keys : call_.kv.values);
    const int64_t of_token = call_.kv.of_token * Slot::kBytes;
    const int bytes = int(call_.kv.width) * Slot::kBytes;
    for (int i = lane_ % kGroup; i < kSlotTokens * kPieces; i += kGroup) {
      const int token = i / kPieces, piece = i % kPieces, byte = begin + piece * 16;
      if (first + token < span.begin || first + token >= span.end) continue;
      const char* const row = rows + place * Slot::kBytes + token * of_token;
      const bool inside = byte < bytes;
      fetch_part(slot + swizzled<Slot::kRow>(token, piece) * 16, inside ? row + byte : row,
                 inside ? 16 : 0);
    }
  }

  const DecodeAttention& call_;
  const Boxes& boxes_;
  Ring& ring_;
  char* const slots_;
  float* scales_;
  Turn turn_;
  uint64_t policy_;
  Unit unit_ahead_;
  int page_ahead_;
  const int lane_ = threadIdx.x % 32, warp_ = lane_ / kGroup;
};

}  // namespace dsx::cuda
