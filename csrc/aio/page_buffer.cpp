// Pages come straight from the system, and go back to it: nothing is rounded up to a power of two
// and nothing is kept.
#include "aio/page_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <new>

namespace dsx::aio {
namespace {

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

int64_t page_size() { return sysconf(_SC_PAGESIZE); }

PageBuffer::PageBuffer(size_t bytes) : bytes_(bytes) {
  const auto page = static_cast<size_t>(page_size());
  // Only what starts at a multiple of a huge page can consist of huge pages.
  const size_t slack = bytes >= huge_page ? huge_page - page : 0;
  if (bytes > SIZE_MAX - slack - page) throw std::bad_alloc();
  mapped_ = round_up(bytes > 0 ? bytes : 1, page);
  void* found =
      mmap(nullptr, mapped_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  address_ = static_cast<char*>(found);
  if (slack == 0) return;
  const size_t front =
      round_up(reinterpret_cast<uintptr_t>(found), huge_page) - reinterpret_cast<uintptr_t>(found);
  if (front > 0) munmap(address_, front);
  address_ += front;
  if (slack > front) munmap(address_ + mapped_, slack - front);
  madvise(address_, mapped_, MADV_HUGEPAGE);  // small pages do as well
}

PageBuffer::~PageBuffer() { munmap(address_, mapped_); }

int PageBuffer::lock() { return mlock(address_, mapped_) == 0 ? 0 : errno; }

}  // namespace dsx::aio
