// The kernel takes at most 1 GiB as one buffer, and sees huge pages only in a buffer that has no
// others, so a region may have several slots. A piece that lies across two of them goes without.
#include "aio/regions.h"

#include <algorithm>

#include "aio/page_buffer.h"

namespace dsx::aio {
namespace {

// How much of this memory the next slot takes.
size_t next_part(const char* begin, size_t bytes) {
  const size_t past = reinterpret_cast<uintptr_t>(begin) % huge_page;
  if (past != 0) return std::min(bytes, huge_page - past);
  const size_t whole = bytes / huge_page * huge_page;
  return whole == 0 ? bytes : std::min(whole, static_cast<size_t>(max_op_bytes));
}

}  // namespace

int Regions::add(void* address, size_t bytes) {
  std::lock_guard lock(mutex_);
  const int number = ++last_number_;
  char* begin = static_cast<char*>(address);
  while (bytes > 0 && !backends_.empty()) {
    const size_t part = next_part(begin, bytes);
    const int slot = free_slot();
    if (slot < 0 || !fix_everywhere(slot, begin, part)) break;
    const auto first = reinterpret_cast<uintptr_t>(begin);
    regions_.push_back({number, slot, first, first + part});
    begin += part;
    bytes -= part;
  }
  return number;
}

void Regions::remove(int number) {
  std::lock_guard lock(mutex_);
  std::erase_if(regions_, [&](const Region& region) {
    if (region.number != number) return false;
    for (Backend* backend : backends_) backend->unfix(region.slot);
    return true;
  });
}

void Regions::close() {
  std::lock_guard lock(mutex_);
  backends_.clear();
  regions_.clear();
}

int Regions::slot_of(const void* address, int64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const auto end = begin + static_cast<uintptr_t>(bytes);
  std::lock_guard lock(mutex_);
  for (const Region& region : regions_) {
    if (region.begin <= begin && end <= region.end) return region.slot;
  }
  return -1;
}

bool Regions::fix_everywhere(int slot, void* address, size_t bytes) {
  for (size_t i = 0; i < backends_.size(); ++i) {
    if (backends_[i]->fix(slot, address, bytes)) continue;
    while (i > 0) backends_[--i]->unfix(slot);
    return false;
  }
  return true;
}

int Regions::free_slot() const {
  for (int slot = 0; slot < page_buffer_slot; ++slot) {
    const bool taken =
        std::ranges::any_of(regions_, [&](const Region& region) { return region.slot == slot; });
    if (!taken) return slot;
  }
  return -1;
}

}  // namespace dsx::aio
