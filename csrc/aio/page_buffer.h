// PageBuffer: memory in whole pages, huge ones where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dsx::aio {

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
