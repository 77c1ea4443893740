// Also of a request whose file could not be opened, so it may have nothing but a path.
#include "aio/error_text.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <variant>

namespace dsx::aio {
namespace {

std::string path_of(const Request& request) {
  return request.file ? request.file->path() : std::get<std::string>(request.transfer.target);
}

std::string what_it_is(const Request& request) {
  const Transfer& transfer = request.transfer;
  return std::string("aio: ") + (transfer.direction == Direction::read ? "read" : "write") +
         " of " + std::to_string(transfer.bytes) + " bytes at offset " +
         std::to_string(transfer.offset) + " of " + path_of(request);
}

std::string space_left(const Request& request) {
  const int64_t bytes = request.file ? request.file->free_bytes() : free_bytes(path_of(request));
  return bytes < 0 ? "" : "; " + std::to_string(bytes) + " bytes are free there";
}

}  // namespace

Failure describe(const Request& request, int code) {
  return {code, what_it_is(request) + " failed: " + message_of(code) + space_left(request)};
}

Failure describe_end_of_file(const Request& request) {
  const Transfer& transfer = request.transfer;
  int64_t size = 0;
  try {
    size = request.file->size();
  } catch (const IoError& error) {
    return describe(request, error.code());
  }
  const int64_t there = std::clamp(size - transfer.offset, int64_t{0}, transfer.bytes);
  return {ENODATA, what_it_is(request) + " returned " + std::to_string(there) +
                       ": the file ends at " + std::to_string(size) + space_left(request)};
}

}  // namespace dsx::aio
