// Memory that ends at a page nobody may touch: one byte read or written too far ends the program,
// also by vector instructions, which sanitizers do not watch.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

class Guarded {
 public:
  Guarded() : page_(sysconf(_SC_PAGESIZE)) {
    void* memory = mmap(nullptr, size_t(2 * page_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    begin_ = static_cast<char*>(memory);
    if (mprotect(begin_ + page_, size_t(page_), PROT_NONE) != 0) std::abort();
  }
  ~Guarded() { munmap(begin_, size_t(2 * page_)); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  // The last `count` elements before the guard.
  template <class T>
  T* last(int64_t count) {
    return reinterpret_cast<T*>(begin_ + page_) - count;
  }

 private:
  int64_t page_;
  char* begin_;
};
