// File: a file by two descriptors, one through the page cache and one around it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "aio/plan.h"

namespace dsx::aio {

enum class Mode : uint8_t { read, write, update };  // write and update create it; none truncates

class File {
 public:
  // These throw IoError.
  static std::shared_ptr<File> open(const std::string& path, Mode mode);
  // A file without a name in this folder, to read and write; it goes with its last descriptor.
  static std::shared_ptr<File> scratch(const std::string& folder);

  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int buffered() const { return buffered_; }
  int direct();           // -1: this file or this file system has none
  Alignment alignment();  // of direct(); granule 0 without it
  void refuse_direct();   // all goes through the page cache: the kernel or the owner wants that
  void abandon();         // closes it at once, under requests of a parent process too

  // These throw IoError.
  int64_t size() const;
  void sync() const;                                   // data and length are on the disk
  void truncate(int64_t bytes) const;                  // or extends it, with a hole
  void allocate(int64_t offset, int64_t bytes) const;  // reserves space, extends; no-op where the
                                                       // file system knows no such thing
  int64_t free_bytes() const;  // for this user, where the file is; -1: unknown

 private:
  File(std::string path, int buffered, int flags);
  void open_direct();

  std::string path_;
  int buffered_;
  int flags_;  // that `buffered` was opened with
  std::once_flag once_;
  int direct_ = -1;
  Alignment alignment_;
  std::atomic<bool> refused_ = false;
};

// The same of a path; when it does not exist, of the nearest folder above that does.
int64_t free_bytes(std::string path);

}  // namespace dsx::aio
