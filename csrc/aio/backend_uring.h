// The io_uring backend.
#pragma once

#include <memory>

#include "aio/backend.h"

namespace dsx::aio {

// Tries all it needs; throws std::system_error when this kernel or its administrator refuses it.
std::unique_ptr<Backend> make_uring_backend(int depth);

}  // namespace dsx::aio
