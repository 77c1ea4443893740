// Keys and values on their way to the tensor cores: a warp of each block reads pages into a ring of
// slots in shared memory, for the others, which multiply what has arrived.
//
// A slot has some tokens of a page as 8 pieces with a gap behind each, so that the same token of
// each piece can be read by one instruction without two of them in the same bank. The tokens of
// eight rows of a matrix are those: row r is one of piece r.
#pragma once

#include "common/cuda/bulk_fetch.cuh"
#include "common/cuda/chain.cuh"
#include "common/cuda/fetch.cuh"
#include "transformer/decode_work_cuda.cuh"
#include "transformer/mma_cuda.cuh"

namespace dsx::cuda {

#ifndef LAB_SLOT_BYTES
#define LAB_SLOT_BYTES 8192
#endif
#ifndef LAB_SLOTS
#define LAB_SLOTS 6
#endif
#ifndef LAB_SPECULATE
#define LAB_SPECULATE 1
#endif

constexpr int kSlotBytes = LAB_SLOT_BYTES, kMostSlots = LAB_SLOTS;
constexpr int kPieces = 8;
constexpr int kPageWarps = kChunkPages;  // each has one of the pages of a chunk
constexpr int kReadingWarp = kPageWarps, kRingThreads = 32 * (kPageWarps + 1);

// Rows of kWidth elements; those of fewer are as if followed by zeros.
template <class Kind, int kWidth>
struct Slot {
  static constexpr int kBytes = Kind::kQuantized ? 1 : 2;
  static constexpr int kRow = kWidth * kBytes;
  static constexpr int kTokens = kSlotBytes / kRow < kPageTokens ? kSlotBytes / kRow : kPageTokens;
  static constexpr int kOfPage = kPageTokens / kTokens;
  static constexpr int kPieceTokens = kTokens / kPieces, kPiece = kPieceTokens * kRow;
  static constexpr int kPitch = kPiece + 16;
  static constexpr int kScales = Kind::kQuantized ? kTokens * 4 : 0;
  static constexpr int kSize = kPieces * kPitch + kScales;
  static_assert(kTokens % 16 == 0 && kPiece % 128 == 0);

  // The tokens of a page that rows g of its matrices are: number i of eight.
  __device__ static constexpr int token(int i, int g) {
    return i / kPieceTokens * kTokens + g * kPieceTokens + i % kPieceTokens;
  }
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

// The warp that reads. Groups of 8 lanes have a page each, and each lane one of its pieces.
template <class Kind, int kWidth>
class Reader {
  using Slot = cuda::Slot<Kind, kWidth>;

 public:
  __device__ Reader(const DecodeAttention& call, Ring& ring, char* slots, int count)
      : call_(call), ring_(ring), slots_(slots), turn_{count} {
    in_bulk_ = kCanBulk && call.kv.of_token == kWidth;
  }

  // What arrives at the barrier of a slot: one thread calls it before any other.
  __device__ static void begin(const DecodeAttention& call, Ring& ring, int slots) {
    const bool in_bulk = kCanBulk && call.kv.of_token == kWidth;
    for (int i = 0; i < slots; ++i) {
      for (Barrier& full : ring.full[i]) full.begin(in_bulk ? 1 : kPieces);
      ring.empty[i].begin(kPageWarps);
    }
  }

  // Has the first pages brought into the L2 cache, if what the table says now is still true later.
  __device__ void ask_for_first() const {
#if __CUDA_ARCH__ >= 900
    if (!in_bulk_) return;
    Units units(call_);
    const Unit unit = units.next();
    const Span span = span_of(unit, page_of(unit));
    const int token = piece_ * (kPageTokens / kPieces);
    if (!span.there || token >= span.end) return;
    const int64_t place = (span.place + token * kWidth) * Slot::kBytes;
    constexpr unsigned kSize = kPageTokens / kPieces * Slot::kRow;
    ask_for(static_cast<const char*>(call_.kv.keys) + place, kSize);
    ask_for(static_cast<const char*>(call_.kv.values) + place, kSize);
#endif
  }

  // Finds the first unit; the others may then begin to wait for what there is of it.
  __device__ void find_first(Units& units) {
    const Unit unit = units.next();
    if (lane_ == 0) ring_.unit(0) = unit;
    page_ahead_ = page_of(unit);
  }

  __device__ void run(Units& units) {
    __syncwarp();
    for (int i = 0; ring_.unit(i).there; ++i) {
      const Unit unit = ring_.unit(i);
      const Span span = span_of(unit, page_ahead_);
      const Unit next = units.next();
      page_ahead_ = page_of(next);
      if (lane_ == 0) ring_.unit(i + 1) = next;
      if (piece_ == 0) ring_.wrong[i % Ring::kUnits][warp_] = span.wrong;
      __syncwarp();
      const int parts = parts_of(call_, unit);
      for (int part = 0; part < parts; ++part) {
        fill<true>(span);
        fill<false>(span);
      }
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  static constexpr bool kCanBulk = true;
#else
  static constexpr bool kCanBulk = false;
#endif

  // The tokens [begin, end) of a page that are to be read.
  struct Span {
    int begin, end;
    bool there, wrong;
    int64_t place, scales;
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
    span.begin = ::max(unit.seen_begin - begin, 0);
    span.end = ::min(unit.length - begin, kPageTokens);
    span.place = call_.kv.place(page, unit.head, 0);
    span.scales = call_.kv.scale_place(page, unit.head, 0);
    return span;
  }

  // Fills slots with the keys or values of a page, as they become free.
  template <bool kKeys>
  __device__ void fill(const Span& span) {
    const PagedKv& kv = call_.kv;
    const char* const rows =
        static_cast<const char*>(kKeys ? kv.keys : kv.values) + span.place * Slot::kBytes;
    const float* scales = nullptr;
    if constexpr (Kind::kQuantized) scales = (kKeys ? kv.key_scales : kv.value_scales) + span.scales;
#pragma unroll
    for (int k = 0; k < Slot::kOfPage; ++k) {
      ring_.empty[turn_.slot].wait(turn_.parity ^ 1);
      Barrier& full = ring_.full[turn_.slot][warp_];
      char* const slot = slots_ + (turn_.slot * kPageWarps + warp_) * Slot::kSize;
      if (in_bulk_) {
        fetch_pieces(span, k * Slot::kTokens, rows, scales, slot, full);
      } else {
        fetch_rows(span, k * Slot::kTokens, rows, scales, slot, full);
      }
      turn_.go_on();
    }
  }

  __device__ void fetch_pieces(const Span& span, int first, const char* rows, const float* scales,
                               char* slot, Barrier& full) {
#if __CUDA_ARCH__ >= 900
    const int token = first + piece_ * Slot::kPieceTokens;
    const bool there =
        span.there && token < span.end && token + Slot::kPieceTokens > span.begin;
    const unsigned pieces = __ballot_sync(0xffffffff, there) >> (lane_ / 8 * 8) & 0xff;
    if (piece_ == 0) {
      full.arrive_expecting(__popc(pieces) * Slot::kPiece + (span.there ? Slot::kScales : 0));
    }
    __syncwarp();
    const uint64_t policy = read_once();
    if (there) {
      fetch_in_bulk(slot + piece_ * Slot::kPitch, rows + token * Slot::kRow, Slot::kPiece, full,
                    policy);
    }
    if constexpr (Kind::kQuantized) {
      if (piece_ == 0 && span.there) {
        fetch_in_bulk(slot + kPieces * Slot::kPitch, scales + first, Slot::kScales, full, policy);
      }
    }
#endif
  }

  // The same for rows that lie apart, are shorter, or where there is nothing better.
  __device__ void fetch_rows(const Span& span, int first, const char* rows, const float* scales,
                             char* slot, Barrier& full) {
    constexpr int kParts = Slot::kRow / 16;
    const int bytes = int(call_.kv.width) * Slot::kBytes;
    for (int i = piece_; span.there && i < Slot::kTokens * kParts; i += kPieces) {
      const int number = i / kParts, place = i % kParts * 16, token = first + number;
      if (token < span.begin || token >= span.end) continue;
      char* const near = slot + number / Slot::kPieceTokens * Slot::kPitch +
                         number % Slot::kPieceTokens * Slot::kRow + place;
      const char* const far = rows + token * call_.kv.of_token * Slot::kBytes;
      const bool inside = place < bytes;
      fetch_part(near, inside ? far + place : far, inside ? 16 : 0);
    }
    if constexpr (Kind::kQuantized) {
      for (int i = piece_; span.there && i < Slot::kTokens / 4; i += kPieces) {
        fetch_bytes<16>(slot + kPieces * Slot::kPitch + i * 16, scales + first + i * 4);
      }
    }
    full.arrive_when_fetched();
  }

  const DecodeAttention& call_;
  Ring& ring_;
  char* const slots_;
  Turn turn_;
  bool in_bulk_;
  int page_ahead_;
  const int lane_ = threadIdx.x % 32, warp_ = lane_ / kPieces, piece_ = lane_ % kPieces;
};

}  // namespace dsx::cuda
