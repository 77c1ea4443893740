// PageBuffer: memory in whole pages, huge ones where the system has them.
//
// A direct transfer hands the device a list of pieces that lie together in memory: a MiB is one of
// them in huge pages and up to 256 in small ones. On a virtual disk that took 1.8 instead of
// 0.85 GB/s reading and 3.7 instead of 2.1 writing, with any block size from 256 KiB to 1 MiB. Only
// the first touch may be slower, where a hypervisor has taken free memory back (0.3 instead of
// 0.7 GB/s): memory that is locked has been touched by then, other memory is in FreshPages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dsx::aio {

inline constexpr size_t huge_page = size_t{2} << 20;

int64_t page_size();

class PageBuffer {
 public:
  explicit PageBuffer(size_t bytes);  // throws std::bad_alloc
  ~PageBuffer();
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;

  char* address() const { return address_; }
  size_t bytes() const { return bytes_; }  // as asked for; the pages go a little further

  int lock();  // keeps it in memory; returns 0 or the errno

 private:
  char* address_;
  size_t bytes_;
  size_t mapped_;
};

}  // namespace dsx::aio
