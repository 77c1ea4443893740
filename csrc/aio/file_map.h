// FileMap: memory that shows parts of files where they lie, and zeros elsewhere.
//
// Nothing is read before it is touched. What is written here never reaches a file: the kernel
// copies a page when it is written to. So state that rests on disk can be looked at, and changed,
// like any other memory, while only those who move it in whole pieces write to the disk. A part
// that is shown as shared is the file itself: what is written there, is written to it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dsx::aio {

class FileMap {
 public:
  explicit FileMap(size_t bytes);  // of zeros; throws std::bad_alloc
  ~FileMap();
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;

  char* address() const { return address_; }
  size_t bytes() const { return bytes_; }

  // Shows a part of a file from now on, and drops what was written there. Offsets are multiples of
  // a page; the part ends with a page of the map, or with the map. Throws IoError.
  void show(size_t begin, size_t bytes, int file, int64_t offset, bool shared);

  // Shows zeros everywhere from now on, and drops what was written. Throws IoError.
  void hide();

 private:
  char* address_;
  size_t bytes_;
  size_t mapped_;
};

}  // namespace dsx::aio
