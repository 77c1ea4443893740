// What went wrong with a file: an errno and one sentence.
#pragma once

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

namespace dsx::aio {

struct Failure {
  int code = 0;  // errno
  std::string text;
};

class IoError : public std::runtime_error {
 public:
  IoError(int code, const std::string& text) : std::runtime_error(text), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

// What the system says of an errno, such as "No space left on device". We seek nowhere: ESPIPE is
// said of what has no offsets.
inline std::string message_of(int code) {
  if (code == ESPIPE) return "it is a pipe or a socket, expected a file";
  return std::generic_category().message(code);
}

}  // namespace dsx::aio
