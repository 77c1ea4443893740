// One range of addresses, kept from the beginning, in which parts of files come and go.
#include "aio/file_map.h"

#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>

#include "aio/error.h"
#include "aio/page_buffer.h"

namespace dsx::aio {
namespace {

constexpr int kRights = PROT_READ | PROT_WRITE;
// Most of it is never written to: the kernel need not have memory for all of it.
constexpr int kZeros = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(page_size());
  return (bytes + page - 1) / page * page;
}

}  // namespace

FileMap::FileMap(size_t bytes) : bytes_(bytes), mapped_(whole_pages(bytes > 0 ? bytes : 1)) {
  void* found = mmap(nullptr, mapped_, kRights, kZeros, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
  address_ = static_cast<char*>(found);
}

FileMap::~FileMap() { munmap(address_, mapped_); }

void FileMap::hide() {
  if (mmap(address_, mapped_, kRights, kZeros | MAP_FIXED, -1, 0) == MAP_FAILED) {
    const int code = errno;
    throw IoError(code, "FileMap: a file is shown still: " + message_of(code));
  }
}

void FileMap::show(size_t begin, size_t bytes, int file, int64_t offset, bool shared) {
  const auto page = static_cast<size_t>(page_size());
  const size_t size = whole_pages(bytes);
  if (begin % page != 0 || bytes == 0 || begin > mapped_ || size > mapped_ - begin || offset < 0 ||
      static_cast<size_t>(offset) % page != 0) {
    throw std::invalid_argument("FileMap: part is of " + std::to_string(bytes) + " bytes at " +
                                std::to_string(begin) + " for offset " + std::to_string(offset) +
                                ", expected whole pages inside of " + std::to_string(bytes_));
  }
  const int how = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED | MAP_NORESERVE;
  if (mmap(address_ + begin, size, kRights, how, file, offset) == MAP_FAILED) {
    const int code = errno;
    const char* hint = code == ENOMEM ? " (see /proc/sys/vm/max_map_count)" : "";
    throw IoError(code, "FileMap: a part of a file is not shown: " + message_of(code) + hint);
  }
}

}  // namespace dsx::aio
