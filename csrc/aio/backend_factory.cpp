// All that is known of each backend beside what it does.
#include "aio/backend_factory.h"

#include <cerrno>
#include <stdexcept>

#include "aio/backend_libaio.h"
#include "aio/backend_threads.h"
#include "aio/backend_uring.h"

namespace dsx::aio {

const char* name_of(BackendKind kind) {
  switch (kind) {
    case BackendKind::io_uring: return "io_uring";
    case BackendKind::libaio: return "libaio";
    case BackendKind::threads: return "threads";
  }
  return "unknown";
}

BackendKind kind_of(const std::string& name) {
  for (const BackendKind kind : backend_kinds) {
    if (name == name_of(kind)) return kind;
  }
  throw std::invalid_argument("AsyncIO: backend is '" + name +
                              "', expected auto, io_uring, libaio or threads");
}

std::unique_ptr<Backend> make_backend(BackendKind kind, int depth) {
  switch (kind) {
    case BackendKind::io_uring: return make_uring_backend(depth);
    case BackendKind::libaio: return make_libaio_backend(depth);
    case BackendKind::threads: return make_threads_backend(depth);
  }
  throw std::invalid_argument("aio: backend is unknown, expected one of backend_kinds");
}

const char* hint_for(BackendKind kind, int code) {
  if (kind == BackendKind::libaio && code == EAGAIN) {
    return "; fs.aio-max-nr is used up: lower queue_depth or threads, or raise it with sysctl";
  }
  if (kind == BackendKind::io_uring && (code == EPERM || code == ENOSYS)) {
    return "; see sysctl kernel.io_uring_disabled and the system calls that a container allows";
  }
  if (kind == BackendKind::io_uring && code == ENOMEM) {
    return "; raise the limit of locked memory: ulimit -l";
  }
  if (kind == BackendKind::threads && code == EAGAIN) {
    return "; lower queue_depth or threads: see ulimit -u";
  }
  return "";
}

}  // namespace dsx::aio
