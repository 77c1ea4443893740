// The backends by name.
#include "aio/backend.h"

#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "aio/backend_libaio.h"
#include "aio/backend_threads.h"
#include "aio/backend_uring.h"

namespace dsx::aio {

int64_t move_now(const Op& op) {
  const auto bytes = static_cast<size_t>(op.bytes);
  const ssize_t moved = op.direction == Direction::read
                            ? pread(op.fd, op.address, bytes, op.offset)
                            : pwrite(op.fd, op.address, bytes, op.offset);
  return moved < 0 ? -errno : moved;
}

const char* name_of(BackendKind kind) {
  switch (kind) {
    case BackendKind::io_uring: return "io_uring";
    case BackendKind::libaio: return "libaio";
    case BackendKind::threads: return "threads";
  }
  return "unknown";
}

std::unique_ptr<Backend> make_backend(BackendKind kind, int depth) {
  switch (kind) {
    case BackendKind::io_uring: return make_uring_backend(depth);
    case BackendKind::libaio: return make_libaio_backend(depth);
    case BackendKind::threads: return make_threads_backend(depth);
  }
  throw std::invalid_argument("aio: backend is unknown, expected one of backend_kinds");
}

}  // namespace dsx::aio
