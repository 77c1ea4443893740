// How a transfer is cut: an unaligned head and tail, which go through the page cache, and a middle
// of whole granules, which goes directly between memory and the device.
//
// A granule is at least a page and a block of the file system, so no page of the cache ever holds
// bytes that travel directly: the kernel would write such a page back over them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dsx::aio {

inline constexpr int64_t largest_granule = 64 << 10;

struct Alignment {
  int64_t granule = 0;  // of offsets and lengths in the file, a power of two up to largest_granule;
                        // 0: nothing is direct
  int64_t memory = 1;   // of addresses, a power of two
};

struct Plan {
  int64_t head = 0;       // bytes
  int64_t middle = 0;     // bytes; direct
  int64_t tail = 0;       // bytes
  Alignment alignment{};  // of the middle
  bool copied = false;    // the middle's address is unaligned: it goes through aligned pages
};

constexpr Plan make_plan(int64_t offset, uintptr_t address, int64_t bytes, Alignment alignment) {
  const int64_t granule = alignment.granule;
  if (granule == 0) return {.head = bytes};
  const int64_t head = (granule - offset % granule) % granule;  // offset + bytes < 2^63, no more
  if (bytes < head + granule) return {.head = bytes};
  const int64_t middle = (bytes - head) / granule * granule;
  const auto first = address + static_cast<uintptr_t>(head);
  const bool copied = first % static_cast<uintptr_t>(alignment.memory) != 0;
  return {head, middle, bytes - head - middle, alignment, copied};
}

// A part of a transfer that is asked of the kernel at once.
struct Piece {
  int64_t start = 0;  // from the beginning of the transfer
  int64_t bytes = 0;
  bool direct = false;
  bool copied = false;
};

// Cuts the piece that starts after `start` bytes. Direct pieces are whole granules, and none is
// longer than a block (or a granule); a copied one is not longer than a page buffer either.
constexpr Piece cut_piece(const Plan& plan, int64_t start, int64_t block, int64_t page_buffer) {
  const int64_t middle_end = plan.head + plan.middle;
  if (start < plan.head) return {start, std::min(block, plan.head - start)};
  if (start >= middle_end) return {start, std::min(block, middle_end + plan.tail - start)};
  const int64_t longest = plan.copied ? std::min(block, page_buffer) : block;
  const int64_t whole =
      std::max(longest / plan.alignment.granule, int64_t{1}) * plan.alignment.granule;
  return {start, std::min(whole, middle_end - start), true, plan.copied};
}

}  // namespace dsx::aio
