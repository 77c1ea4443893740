// Regions: memory that the kernel has been told about, so that it need not look up its pages for
// every piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "aio/backend.h"

namespace dsx::aio {

inline constexpr int page_buffer_slot = region_slots - 1;  // each worker's own aligned pages

class Regions {
 public:
  explicit Regions(std::vector<Backend*> backends) : backends_(std::move(backends)) {}

  // Returns a number for remove(). Where the kernel declines, or has no slot left, I/O there works
  // as anywhere else.
  int add(void* address, size_t bytes);
  void remove(int number);  // before the memory goes; nothing may be in flight there
  void close();             // the backends go

  int slot_of(const void* address, int64_t bytes) const;  // -1: in none

 private:
  struct Region {
    int number;
    int slot;
    uintptr_t begin;
    uintptr_t end;
  };

  bool fix_everywhere(int slot, void* address, size_t bytes);
  int free_slot() const;

  std::vector<Backend*> backends_;
  mutable std::mutex mutex_;
  std::vector<Region> regions_;
  int last_number_ = 0;
};

}  // namespace dsx::aio
