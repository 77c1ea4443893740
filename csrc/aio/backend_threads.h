// The backend of last resort: a pool of threads that wait in pread and pwrite.
#pragma once

#include <memory>

#include "aio/backend.h"

namespace dsx::aio {

std::unique_ptr<Backend> make_threads_backend(int depth);

}  // namespace dsx::aio
