// Keys and values on their way to the tensor cores: a warp of each block reads pages into a ring of
// slots in shared memory, for the others, which multiply what has arrived.
//
// A slot has a box: 64 or 128 bytes of each of some tokens of a page. In its matrices of 8 rows,
// these are tokens one after the other.
#pragma once

#include "common/cuda/bulk_fetch.cuh"
#include "common/cuda/chain.cuh"
#include "common/cuda/fetch.cuh"
#include "transformer/decode_work_cuda.cuh"
#include "transformer/mma_cuda.cuh"

namespace dsx::cuda {

// Two slots are waited for together: what is read at a time is 8 KiB or more of a page.
constexpr int kSlotTokens = 32, kMostSlots = 12, kTogether = 2, kSlotsAlignment = 1024;
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
  Unit units[kUnits];
  bool wrong[kUnits][kPageWarps];  // there is no such page

  __device__ Unit& unit(int i) { return units[i % kUnits]; }
};

// Where a warp is in the ring.
struct Turn {
  int slots, slot = 0;
  unsigned parity = 0;

  __device__ void go_on() {
    if (++slot == slots) slot = 0, parity ^= 1;
  }
};

// How many times the rows of a unit take the keys, 8 at a time.
constexpr int kUnitRows = 8;
__device__ inline int parts_of(const DecodeAttention& call, const Unit& unit) {
  return (unit.count * int(call.group) + kUnitRows - 1) / kUnitRows;
}

// The warp that reads. Groups of 8 lanes have a page each.
template <class Kind, int kWidth>
class Reader {
  using Slot = cuda::Slot<Kind, kWidth>;

 public:
  __device__ Reader(const DecodeAttention& call, const Boxes& boxes, Ring& ring, char* slots)
      : call_(call), boxes_(boxes), ring_(ring), slots_(slots), turn_{boxes.slots} {
    scales_ = reinterpret_cast<float*>(slots + boxes.slots * kPageWarps * Slot::kSize);
  }

  // What arrives at the barrier of a slot: one thread calls it before any other.
  __device__ static void begin(const Boxes& boxes, Ring& ring) {
    for (int i = 0; i < boxes.slots; ++i) {
      for (Barrier& full : ring.full[i]) full.begin(are_there(boxes) ? 1 : kGroup);
      ring.empty[i].begin(kPageWarps);
    }
  }

  // Finds the first unit, and has its pages brought into the L2 cache; then makes sure of it. The
  // others may then begin to wait for what there is of it.
  __device__ Units find_first() {
    Units units(call_);
    find_first(units);
#if __CUDA_ARCH__ >= 900
    if (boxes_.there) ask_for_first();
#endif
    wait_for_previous();
    if (units.are_still_so()) {
      page_ahead_ = page_of(unit_ahead_);
    } else {
      units = Units(call_);
      find_first(units);
    }
    if (lane_ == 0) ring_.unit(0) = unit_ahead_;
    return units;
  }

  __device__ void run(Units& units) {
#if __CUDA_ARCH__ >= 900
    policy_ = read_once();
#endif
    for (int i = 0; unit_ahead_.there; ++i) {
      const Unit unit = unit_ahead_;
      const int page = page_ahead_;
      unit_ahead_ = units.next();
      page_ahead_ = page_of(unit_ahead_);
      const Span span = span_of(unit, page);
      if (lane_ == 0) ring_.unit(i + 1) = unit_ahead_;
      if (lane_ % kGroup == 0) ring_.wrong[i % Ring::kUnits][warp_] = span.wrong;
      __syncwarp();
      const int parts = parts_of(call_, unit);
      for (int part = 0; part < parts; ++part) {
        fill<true>(unit.head, page, span);
        fill<false>(unit.head, page, span);
      }
    }
    let_next_begin();
  }

 private:
  __device__ void find_first(Units& units) {
    unit_ahead_ = units.next();
    page_ahead_ = page_of(unit_ahead_);
  }
#if __CUDA_ARCH__ >= 900
  __device__ void ask_for_first() const {
    if (lane_ % kGroup != 0 || !span_of(unit_ahead_, page_ahead_).there) return;
#pragma unroll
    for (int k = 0; k < Slot::kOfPage; ++k) {
      const int element = k / Slot::kParts * Slot::kElements,
                token = k % Slot::kParts * kSlotTokens;
      ask_for_box(boxes_.keys, element, token, unit_ahead_.head, page_ahead_);
      ask_for_box(boxes_.values, element, token, unit_ahead_.head, page_ahead_);
    }
  }
#endif

  __device__ static bool are_there(const Boxes& boxes) {
#if __CUDA_ARCH__ >= 900
    return boxes.there;
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
  template <bool kKeys>
  __device__ void fill(int head, int page, const Span& span) {
#pragma unroll
    for (int k = 0; k < Slot::kOfPage; ++k) {
      const int box = k / Slot::kParts, token = k % Slot::kParts * kSlotTokens;
      if (k % kTogether == 0) {
        Turn turn = turn_;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          ring_.empty[turn.slot].wait(turn.parity ^ 1);
          turn.go_on();
        }
      }
      const int number = turn_.slot * kPageWarps + warp_;
      Barrier& full = ring_.full[turn_.slot][warp_];
      char* const slot = slots_ + number * Slot::kSize;
      float* const near = scales_ + number * Slot::kScales;
      const bool there = span.there && token < span.end && token + kSlotTokens > span.begin;
      const bool with_scales = Kind::kQuantized && k == 0 && span.there;
      const float* scales = nullptr;
      if constexpr (Kind::kQuantized) {
        scales = (kKeys ? call_.kv.key_scales : call_.kv.value_scales) +
                 call_.kv.scale_place(page, head, 0);
      }
#if __CUDA_ARCH__ >= 900
      if (boxes_.there) {
        if (lane_ % kGroup == 0) {
          full.arrive_expecting((there ? Slot::kSize : 0) + (with_scales ? kPageTokens * 4 : 0));
          if (there) {
            fetch_box(slot, kKeys ? boxes_.keys : boxes_.values, box * Slot::kElements, token, head,
                      page, full, policy_);
          }
          if (with_scales) fetch_in_bulk(near, scales, kPageTokens * 4, full);
        }
        turn_.go_on();
        continue;
      }
#endif
      if (there) fetch_rows<kKeys>(call_.kv.place(page, head, token), box, token, span, slot);
      if (with_scales) {
        for (int i = lane_ % kGroup; i < kPageTokens / 4; i += kGroup) {
          fetch_bytes<16>(near + i * 4, scales + i * 4);
        }
      }
      full.arrive_when_fetched();
      turn_.go_on();
    }
  }

  template <bool kKeys>
  __device__ void fetch_rows(int64_t place, int box, int first, const Span& span, char* slot) {
    constexpr int kPieces = Slot::kRow / 16;
    const char* const rows = static_cast<const char*>(kKeys ? call_.kv.keys : call_.kv.values);
    const int64_t of_token = call_.kv.of_token * Slot::kBytes;
    const int bytes = int(call_.kv.width) * Slot::kBytes;
    for (int i = lane_ % kGroup; i < kSlotTokens * kPieces; i += kGroup) {
      const int token = i / kPieces, piece = i % kPieces, byte = box * Slot::kRow + piece * 16;
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
