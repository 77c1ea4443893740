// What backends do where the kernel moves a piece only while a thread waits.
#include "aio/backend.h"

#include <unistd.h>

#include <cerrno>

namespace dsx::aio {

int64_t move_now(const Op& op) {
  const auto bytes = static_cast<size_t>(op.bytes);
  const ssize_t moved = op.direction == Direction::read
                            ? pread(op.fd, op.address, bytes, op.offset)
                            : pwrite(op.fd, op.address, bytes, op.offset);
  return moved < 0 ? -errno : moved;
}

}  // namespace dsx::aio
